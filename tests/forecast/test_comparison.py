"""What was forecast, compared with what happened."""

from hotbed.forecast.comparison import pairs
from hotbed.forecast.memory import WORKSPACE


def test_a_peak_is_forecast_only_where_the_workspace_was_measured():
    parts = [{"name": "rows in the cache", "num_bytes": 5}, {"name": "index of the cache", "num_bytes": 2}]
    forecast = {"bytes": parts, "device_bytes": 40, "traffic": {"hit_rate": 0.5}}
    truth = {"hit_rate": 0.6, "cache_bytes": 7, "peak_device_bytes": 146, "samples_per_s": 10}
    told = {one.name: one.forecast for one in pairs(forecast, truth)}
    assert told == {"hit_rate": 0.5, "cache_bytes": 7, "peak_device_bytes": None, "samples_per_s": None}
    parts.append({"name": WORKSPACE, "num_bytes": 100})
    assert {one.name: one.forecast for one in pairs(forecast, truth)}["peak_device_bytes"] == 40

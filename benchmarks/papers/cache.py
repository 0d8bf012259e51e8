"""The frequency-aware cache (arXiv 2208.05321): what the files of results say of its claims."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.papers.evidence import H200, TWO_CORES, Evidence, find, gpu, rows_of


def small_cache_trains() -> Evidence:
    cached, whole, peer = gpu("hotbed-cached"), gpu("hotbed-hbm"), gpu("fbgemm-hbm")
    text = f"1.5 % of the rows: {cached:.2f} ms a step, all rows {whole:.2f}, FBGEMM with all rows {peer:.2f}"
    return Evidence(text, H200, "reproduced" if cached < 2 * peer else "not reproduced")


def small_cache_from_files() -> Evidence:
    cached, whole = (find("from_files_h200", system=f"hotbed, files, {name}")[0] for name in ("cached", "hbm"))
    share = float(cached["samples_per_s"]) / float(whole["samples_per_s"])
    text = (
        f"from files, 1.5 % cached: {float(cached['samples_per_s']):,.0f} samples/s, {share:.2f} of all rows on the GPU"
    )
    return Evidence(text, H200, "reproduced" if share > 0.62 else "not reproduced", "theirs: 0.62 of all rows")


def device_memory() -> Evidence:
    cached, whole = gpu("hotbed-cached", "peak_gib"), gpu("hotbed-hbm", "peak_gib")
    text = f"{cached:.2f} GiB instead of {whole:.1f}, 1 / {whole / cached:.0f}"
    return Evidence(
        text, H200, "reproduced" if whole > 10 * cached else "shape reproduced", "Kaggle's tables, not 1TB's"
    )


def memory_by_dim() -> Evidence:
    sizes = [(dim, gpu("hotbed-cached", "peak_gib", dim=dim)) for dim in ("128", "64", "32")]
    text = ", ".join(f"dim {dim}: {size:.2f} GiB" for dim, size in sizes)
    falls = sizes[0][1] > sizes[1][1] > sizes[2][1]
    return Evidence(
        text, H200, "shape reproduced" if falls else "not reproduced", "device memory follows the cached rows"
    )


def hit_rates() -> Evidence:
    rates = [
        (float(row["cache"]), float(row["truth"]))
        for row in find("plan_h200", log="criteo", run_on="cuda", name="lookup_hit_rate")
    ]
    text = ", ".join(f"{share:.1%}: {rate:.0%}" for share, rate in rates).replace("%", " %")
    rises = all(a[1] < b[1] for a, b in pairwise(rates))
    return Evidence(f"lookups that hit, by share cached: {text}", H200, "shape reproduced" if rises else "not reproduced",
                    "Criteo's first 60,000 rows; batches grow with the share")  # fmt: skip


def hit_rate_of_steady_state() -> Evidence:
    hits, misses = (gpu("hotbed-cached", f"{name}_per_step", "embedding_step") for name in ("hits", "misses"))
    lookups = 16384 * 26
    text = f"{hits / (hits + misses):.0%} of distinct rows, {1 - misses / lookups:.0%} of lookups".replace("%", " %")
    return Evidence(text, H200, "reproduced", "Zipf 1.05, oracle policy, 1.5 % cached")


def forecast_of_hits() -> Evidence:
    rows = find("plan_h200", name="lookup_hit_rate")
    off = max(abs(float(row["forecast"]) - float(row["truth"])) for row in rows)
    text = f"forecast before the run off by at most {off:.4f} in {len(rows)} runs"
    return Evidence(text, H200, "reproduced" if off < 0.005 else "shape reproduced")


def adam_cached() -> Evidence:
    rows = [row for row in rows_of("h200_bars_two_rounds") if row["optimizer"] == "adam" and row["dim"] == "128"]
    best = {name: min(float(row["ms_p50"]) for row in rows if row["system"] == name and row["benchmark"] == "training_step")
            for name in ("fbgemm-hbm", "hotbed-cached")}  # fmt: skip
    ratio = best["hotbed-cached"] / best["fbgemm-hbm"]
    text = f"Adam, 1.5 % cached: {best['hotbed-cached']:.2f} ms, {ratio:.2f} of FBGEMM with all rows"
    return Evidence(text, H200, "reproduced" if ratio < 1.5 else "shape reproduced", "state travels with its row")


def against_another_cache() -> Evidence:
    ours = gpu("hotbed-cached", benchmark="embedding_step", ids="bags", batch="4096")
    theirs = gpu("fbgemm-lru-managed", benchmark="embedding_step", ids="bags", batch="4096")
    text = f"bags of 214 ids, 5 % cached: {ours:.2f} ms, FBGEMM's cache {theirs:.2f}"
    return Evidence(text, H200, "reproduced" if ours < theirs else "not reproduced")


def planning_cost() -> Evidence:
    row = find("cache_step_2_cores", cache="0.015")[0]
    share = float(row["planning_ms"]) / float(row["step_ms"])
    text = f"planning {float(row['planning_ms']):.1f} of {float(row['step_ms']):.1f} ms a step, {share:.0%}".replace(
        "%", " %"
    )
    return Evidence(text, TWO_CORES, "shape reproduced")

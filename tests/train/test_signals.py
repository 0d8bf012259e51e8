import signal
import threading

import pytest

from hotbed.train.run import StopSignals


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_asks_and_a_later_ctrl_c_stops_at_once(number, code):
    before = signal.getsignal(number)
    with StopSignals() as stop:
        assert not stop()
        assert stop.exit_code == 0
        signal.raise_signal(number)
        assert stop()
        assert stop.exit_code == code
        signal.raise_signal(signal.SIGTERM)  # launchers send it twice
        assert stop.exit_code == code
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(number) is before


def test_other_threads_leave_signals_alone():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work():
        with StopSignals() as stop:
            seen.append((stop(), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]

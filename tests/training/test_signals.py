"""Where a signal is answered at once, and where it waits for a safe point."""

import os
import signal
import threading
import time
from contextlib import suppress

import pytest

from training.signals import Interrupted, Signals, requeue


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_nothing_can_be_lost_it_is_answered_at_once(number: int):
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=signal.Signals(number).name) as caught, Signals() as s, s.at_once():
        os.kill(os.getpid(), number)
    assert caught.value.number == number
    assert signal.getsignal(number) is before


def test_nothing_swallows_it():
    assert not issubclass(Interrupted, Exception)  # so that no `except Exception` in a library does
    with pytest.raises(Interrupted), Signals() as signals, signals.at_once(), suppress(Exception):
        os.kill(os.getpid(), signal.SIGTERM)


def test_elsewhere_it_waits_for_a_safe_point(capfd):
    with Signals() as signals:
        signals.check()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGTERM
        assert "SIGTERM: stopping at the next safe point; a second signal stops at once" in capfd.readouterr().err
        with pytest.raises(Interrupted):
            signals.check()
        with pytest.raises(Interrupted), signals.at_once():
            pytest.fail("it should not begin")


def test_a_second_one_ends_the_process(monkeypatch):
    ended = []
    monkeypatch.setattr("os._exit", ended.append)
    with Signals():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + 10
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
    assert ended == [130]


def test_one_signal_in_each_of_two_runs_is_no_second_one(monkeypatch):
    ended = []
    monkeypatch.setattr("os._exit", ended.append)
    threads = threading.active_count()
    for _ in range(2):
        with Signals():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
    time.sleep(0.1)
    assert not ended
    assert threading.active_count() <= threads  # one of an earlier test may have ended meanwhile


def test_one_whose_exception_got_lost_is_found_at_the_end_of_the_block():
    # as a destructor swallows it
    with Signals() as signals, pytest.raises(Interrupted), signals.at_once(), suppress(Interrupted):
        os.kill(os.getpid(), signal.SIGINT)


def test_contexts_one_in_another_know_of_each_others_signal():
    with Signals() as outer:
        with Signals():
            os.kill(os.getpid(), signal.SIGTERM)
        assert outer.received == signal.SIGTERM
        with Signals() as following, pytest.raises(Interrupted, match="SIGTERM"):
            following.check()


def test_slurms_warning_counts_under_slurm_alone(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    before = signal.getsignal(signal.SIGUSR1)
    with Signals():
        assert signal.getsignal(signal.SIGUSR1) is before
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(Interrupted, match="SIGUSR1"), Signals() as signals, signals.at_once():
        os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_job_of_an_array_is_put_back_by_its_own_number(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("subprocess.run", lambda words, check: asked.append(words))
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    requeue()
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    requeue()
    assert asked == [["scontrol", "requeue", "77"], ["scontrol", "requeue", "70_4"]]
    monkeypatch.undo()
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("PATH", "")
    requeue()
    assert "normlab: scontrol requeue 77 failed: " in capsys.readouterr().err


def test_in_another_thread_nothing_happens():
    before, went = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with Signals() as signals, signals.at_once():
            went.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert went == [True]

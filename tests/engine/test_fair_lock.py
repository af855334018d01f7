from __future__ import annotations

import threading
import time

import pytest

from kvist.engine.fair_lock import FairLock


def waiting(lock: FairLock, count: int) -> None:
    """Return once `count` threads wait."""
    deadline = time.monotonic() + 10
    while len(lock._waiters) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_waiters_are_served_in_the_order_in_which_they_came() -> None:
    lock, order, threads = FairLock(), [], []
    with lock:
        for number in range(8):

            def take(number: int = number) -> None:
                with lock:
                    order.append(number)

            threads.append(threading.Thread(target=take))
            threads[-1].start()
            waiting(lock, number + 1)
    for thread in threads:
        thread.join()
    assert order == list(range(8))


def test_a_thread_that_gives_it_back_and_takes_it_again_lets_others_pass() -> None:
    lock, taken = FairLock(), []

    def take() -> None:
        with lock:
            taken.append("other")

    thread = threading.Thread(target=take)
    with lock:
        thread.start()
        waiting(lock, 1)
    with lock:
        assert taken == ["other"]
    thread.join()


def test_one_thread_at_a_time() -> None:
    lock, inside, most = FairLock(), [], []

    def work() -> None:
        for _ in range(50):
            with lock:
                inside.append(1)
                most.append(len(inside))
                time.sleep(0)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 200
    assert max(most) == 1


def test_try_acquire_does_not_wait() -> None:
    lock = FairLock()
    assert lock.try_acquire()
    assert not lock.try_acquire()
    lock.release()
    assert lock.try_acquire()


def test_it_is_given_back_after_an_error() -> None:
    lock = FairLock()
    with pytest.raises(KeyError), lock:
        raise KeyError
    assert lock.try_acquire()

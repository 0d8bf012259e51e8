"""Memory that is taken page by page, and who has it."""

import faulthandler
import mmap
import os
import sys

import numpy as np
import pytest

from hotbed.host.pages import keep_from_children, zeros


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
@pytest.mark.skipif(sys.platform != "linux", reason="advice of Linux")
def test_pages_that_are_kept_from_children_are_not_in_them():
    array = zeros((4 * mmap.PAGESIZE,), np.uint8, huge=False)
    array[:] = 7
    start = array.ctypes.data
    keep_from_children(start, mmap.PAGESIZE)

    def exit_of(offset):
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            os._exit(int(array[offset]))
        return os.waitpid(child, 0)[1]

    assert os.waitstatus_to_exitcode(exit_of(mmap.PAGESIZE)) == 7
    assert os.WIFSIGNALED(exit_of(0))
    assert array[0] == 7

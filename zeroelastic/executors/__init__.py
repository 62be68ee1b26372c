"""Engines that run tables of byte ranges: read, write, copy and sum. All agree bit for bit with the numpy one.

    tables            what every engine accepts: tables, options, progress; and what an engine is
    dispatch          the functions that callers use; chooses the engine
    numpy_executor    the reference
    native_executor   the C++ engine, and its interface in ctypes
    cuda_executor     segments in device memory
    staged            device memory without the CUDA engine, through host memory
    remote_executor   files behind fsspec
    library_build     how the C++ and CUDA engines are compiled
    build_info        what was built, and why not
    batches           rows cut into batches that fit a buffer

Imports ``io`` and ``core``. Read ``tables``, then ``dispatch``.
"""

"""Files and directories, on local disks and behind fsspec.

    storage  listing, sizes and reading by range for a path or a URL
    paths    the types of paths, what a user's text means, and files of this machine: listed, and read by range
    remote   the same behind fsspec
    retries  which failures may pass, and requests that are made again
    atomic   files, and objects of a store, that are written whole or not at all
    large_pages  pages of 2 MiB for new memory, if they come faster here

Imports ``zeroelastic.errors`` and ``core``. Read ``storage`` first.
"""

"""Files and directories, on local disks and behind fsspec.

    storage           listing, sizes and reading by range for a path or a URL
    paths             the types of paths, and what a user's text means
    local             local files: symbolic links are checked when one is opened
    remote            files behind fsspec: one range, or many at the same time
    objects           objects of a store: put, removed, listed; ``upload`` for large ones
    retry             requests that are made again when they fail for a passing reason
    block_cache       a remote file that is read in blocks, for headers
    failures          what went wrong, in one line
    pinned_directory  a directory that stays the same while its name may be given to another
    atomic            files that are written whole or not at all

Imports ``zeroelastic.errors`` and ``core``. Read ``storage`` first.
"""

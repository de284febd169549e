"""Archives that tests download or import."""

import hashlib
import io
import tarfile
from pathlib import Path


def tar_bz2(path: Path, files: dict[str, bytes]) -> str:
    """Writes an archive and gives its checksum."""
    with tarfile.open(path, "w:bz2") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()

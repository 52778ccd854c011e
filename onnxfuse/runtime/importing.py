"""CuPy, imported by one thread at a time and from its top.

Its extension modules import one another in circles.  Where one thread begins with ``cupy`` and another with a module
of it, each waits for a lock that the other holds; Python breaks that by giving one of them a module that is not
finished, and CuPy says that it was not installed rightly.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

_TURN = Lock()


def import_cupy() -> Any:
    """The module ``cupy``.

    Raises:
        ImportError: it is missing or does not load; so says every further call, where CuPy itself would fail otherwise,
            as half of it is there.
    """
    with _TURN:
        try:
            import cupy
        except ImportError:
            raise
        except Exception as error:  # what its loader met: AttributeError, RuntimeError, OSError
            raise ImportError(f"CuPy does not load: {error}") from error
        return cupy

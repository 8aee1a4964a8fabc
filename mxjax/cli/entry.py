"""The process around the commands: Ctrl-C ends it with exit code 130 and one line, wherever it strikes.

Python raises KeyboardInterrupt in whatever code happens to run. Inside a garbage collector's callback, a ``__del__`` or
a weakref's callback (JAX and the import system have such) it is printed and dropped, and the command would go on. While
an extension module initializes itself, it makes NumPy print a traceback and jaxlib abort. So this module remembers that
Ctrl-C was pressed, and raises KeyboardInterrupt again or a moment later. It imports nothing that takes time: the
handler has to be there before JAX is imported.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

INTERRUPTED = 130
_AGAIN_SECONDS = 0.01
_seen = False


def main() -> None:
    """What the script ``mxjax`` calls."""
    run(_command)


def _command() -> None:
    # On a GPU XLA tries out many ways for each matrix product of a program: 40 s for MR-GPTQ of a small model, whose
    # programs run a few hundred times. Commands that measure speed want them, and so may whoever sets XLA_FLAGS.
    if sys.argv[1:2] not in (["bench"], ["tune"]):
        os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    from mxjax.cli.app import main as command

    command.main()


def run(command: Callable[[], Any]) -> Any:
    """Run ``command`` as the whole of this process; after Ctrl-C, end the process."""
    try:
        install()
        result = command()
    except KeyboardInterrupt:
        _leave()
    except SystemExit as e:
        if interrupted():
            _leave(said=e.code == INTERRUPTED)
        _ignore()
        raise
    return result


def interrupted() -> bool:
    """Whether Ctrl-C was pressed since :func:`install`, even if its KeyboardInterrupt got lost."""
    return _seen


def install() -> None:
    """Handle Ctrl-C from now on. A process that was started to ignore it (``nohup``) still does."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    try:
        signal.signal(signal.SIGINT, _on_signal)
    except ValueError:  # not the main thread: Ctrl-C is the caller's business
        return
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, _on_signal)
        if sys.unraisablehook is not _on_unraisable:
            sys.unraisablehook = _on_unraisable


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _seen
    _seen = True
    if hasattr(signal, "setitimer") and _loads_extension(frame):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
    else:
        raise KeyboardInterrupt


def _loads_extension(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_qualname.startswith("ExtensionFileLoader."):
            return True
        frame = frame.f_back
    return False


def _on_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """A KeyboardInterrupt that got lost comes again in a moment: raised here, it would be lost once more."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
    else:
        sys.__unraisablehook__(unraisable)


def _ignore() -> None:
    """No more KeyboardInterrupt: the work is over."""
    if signal.getsignal(signal.SIGINT) is _on_signal:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if hasattr(signal, "SIGALRM"):
            signal.signal(signal.SIGALRM, signal.SIG_IGN)


def _leave(said: bool = False) -> None:
    """End at once. An orderly shutdown of Python can crash under a computation that XLA's threads still run."""
    _ignore()
    if not said:
        print("interrupted", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a closed pipe must not keep the process
            pass
    os._exit(INTERRUPTED)

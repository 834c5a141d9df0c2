"""Reads and writes of the pool are switched off and on by a file while the engine runs, for an incident.

    reads = "off"        nothing is looked up or loaded
    writes = "off"       nothing is stored

What it does not name is on. Without a file all is on.
"""

import logging
import threading
import tomllib
from pathlib import Path

from kvcore.access import ALL_ACCESS, Access, Switch
from kvcore.errors import InvalidArgument, require

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's, whose handlers print it

LOOK_EVERY_S = 1.0

MAX_CHARACTERS = 4_096

_SWITCHES = ("reads", "writes")


def read_switches(text: str) -> Access:
    """What the content of a control file allows.

    Raises InvalidArgument for all but TOML with `reads`, `writes` or both, each "on" or "off": a file that is empty, or
    half written, is not one that allows everything.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument("control file", text, f'TOML such as reads = "off" ({error})') from error
    require(content, "control file", text, f"{' or '.join(_SWITCHES)}; to allow all, remove the file")
    for name in content:
        require(name in _SWITCHES, "control file key", name, f"one of {', '.join(_SWITCHES)}")
    reads, writes = (_switch(name, content.get(name, Switch.ON.value)) for name in _SWITCHES)
    return Access(reads, writes)


class ControlFile:
    """`access` is what the file last said that was understood. A thread reads it once a second, so no step waits."""

    def __init__(self, path: str) -> None:
        self.access = ALL_ACCESS
        self._path = Path(path)
        self._refused: str | None = None
        self._left = threading.Event()
        self.look()
        logger.info("kvtwin: %s switches reads and writes of the pool; now %s", path, _said(self.access))
        self._thread = threading.Thread(target=self._watch, name="kvtwin-control", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> bool:
        """Whether what is in the file now is not understood."""
        return self._refused is not None

    def look(self) -> None:
        """Read the file; each change goes to the log once."""
        try:
            access = self._read()
        except (OSError, ValueError) as error:
            if str(error) != self._refused:
                logger.error("kvtwin: %s is not heeded (%s): still %s", self._path, error, _said(self.access))
            self._refused = str(error)
            return
        if access != self.access or self._refused is not None:
            logger.warning("kvtwin: %s: from now on %s", self._path, _said(access))
        self.access, self._refused = access, None

    def close(self) -> None:
        """Stop reading it."""
        self._left.set()
        self._thread.join(LOOK_EVERY_S)

    def _read(self) -> Access:
        try:
            with self._path.open(encoding="utf-8") as file:
                text = file.read(MAX_CHARACTERS + 1)
        except FileNotFoundError:
            return ALL_ACCESS
        require(len(text) <= MAX_CHARACTERS, "control file", text, f"at most {MAX_CHARACTERS} characters")
        return read_switches(text)

    def _watch(self) -> None:
        while not self._left.wait(LOOK_EVERY_S):
            self.look()


def _switch(name: str, value: object) -> Switch:
    try:
        return Switch(value)
    except ValueError:
        raise InvalidArgument(name, value, '"on" or "off"') from None


def _said(access: Access) -> str:
    return f"reads are {access.reads.value}, writes are {access.writes.value}"

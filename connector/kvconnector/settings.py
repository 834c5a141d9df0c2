"""Settings, read strictly: a misspelt key is an error that names its neighbours.

A value comes from `kv_connector_extra_config`, else from Mooncake's environment variable (or ours, for what must not be
in vLLM's log), else from the JSON file that MOONCAKE_CONFIG_PATH names, else from the default.
"""

import difflib
import json
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from kvcore.errors import InvalidArgument, require

CONFIG_PATH_VARIABLE = "MOONCAKE_CONFIG_PATH"

# Mooncake's settings, with the environment variable of each; the last one is ours.
_ENVIRONMENT: Mapping[str, str | None] = {
    "master_server_address": "MOONCAKE_MASTER",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "mode": None,
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "local_hostname": "MOONCAKE_REQUESTER_LOCAL_HOSTNAME",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
    "tenant_id": "MOONCAKE_TENANT_ID",
    "enable_ssd_offload": "MOONCAKE_OFFLOAD_ENABLED",
    "ssd_offload_path": "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
    "preferred_segment": "MOONCAKE_PREFERRED_SEGMENT",
    "record_key": "KVTWIN_RECORD_KEY",
}

# Settings of vLLM's MooncakeStoreConnector that change its keys and values.
_SHARDED_STORE_KEYS = ("enable_store_tp_lcm", "prefill_tp_sizes", "store_tp_size")
_SHARDED_STORE = (
    "leave this one out: objects that engines of different tensor parallel sizes share are not supported, and those "
    "that MooncakeStoreConnector made with it are not found"
)

EnumT = TypeVar("EnumT", bound=Enum)

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)
_POWER_OF_1024 = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}

_FLAGS = dict.fromkeys(("true", "1", "yes", "on", "enable"), True)
_FLAGS |= dict.fromkeys(("false", "0", "no", "off", "disable", ""), False)
"""As Mooncake reads them."""


class Settings:
    """Where values come from; remembers which keys were asked for, which are the known ones.

    Every method raises InvalidArgument naming the key, its value and what was expected.
    """

    def __init__(self, extra: Mapping[str, object], environment: Mapping[str, str]) -> None:
        self._extra = extra
        self._environment = environment
        self._file = _read_file(environment.get(CONFIG_PATH_VARIABLE))
        self._known: set[str] = set()

    def value(self, key: str, default: object = None) -> object:
        """As it is written."""
        self._known.add(key)
        if key in self._extra:
            return self._extra[key]
        if key not in _ENVIRONMENT:
            return default
        variable = _ENVIRONMENT[key]
        if variable is not None and variable in self._environment:
            return self._environment[variable]
        # The file is Mooncake's: only its own settings are read from it, and more may be in it.
        written = self._file.get(key)
        return default if written is None else written

    def text(self, key: str, default: str) -> str:
        """A text, empty or not."""
        value = self.value(key, default)
        require(isinstance(value, str), key, value, "a string")
        return str(value)

    def names(self, key: str) -> tuple[str, ...]:
        """Names in one text with commas between them, as Mooncake has it, or in a list; none by default."""
        value = self.value(key, "")
        names = value.split(",") if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise InvalidArgument(key, value, "a name, or a list of names")
        return tuple(name.strip() for name in names if name.strip())

    def texts(self, key: str) -> Mapping[str, str]:
        """An object of texts, empty by default."""
        value = self.value(key, {})
        valid = isinstance(value, Mapping) and all(isinstance(v, str) for pair in value.items() for v in pair)
        if not isinstance(value, Mapping) or not valid:
            raise InvalidArgument(key, value, "an object of strings")
        return dict(value)

    def choice(self, key: str, default: EnumT) -> EnumT:
        """One of the default's kind, by its value."""
        return choice(type(default), key, self.value(key, default.value))

    def flag(self, key: str, *, default: bool) -> bool:
        """Also as a text, which is all that an environment variable can be."""
        value = self.value(key, default)
        flag = _FLAGS.get(value.strip().lower()) if isinstance(value, str) else value
        if not isinstance(flag, bool):
            raise InvalidArgument(key, value, "true or false")
        return flag

    def count(self, key: str, default: int, at_least: int) -> int:
        """A whole number."""
        count = self.count_if_set(key, at_least)
        return default if count is None else count

    def count_if_set(self, key: str, at_least: int) -> int | None:
        """A whole number, or None."""
        value = self.value(key)
        if value is None and key not in self._extra:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise InvalidArgument(key, value, f"an integer >= {at_least}")
        return value

    def share(self, key: str, default: float) -> float:
        """A part of a whole."""
        value = self.value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise InvalidArgument(key, value, "a number above 0, at most 1")
        return float(value)

    def size_bytes(self, key: str, default_bytes: int) -> int:
        """Bytes, with a unit or without."""
        value = self.value(key, default_bytes)
        match = None if isinstance(value, bool) else _SIZE.fullmatch(str(value))
        if match is None:
            raise InvalidArgument(key, value, 'bytes, or a text such as "64MB" or "4GiB" (powers of 1024)')
        number, unit = match.groups()
        return int(float(number) * 1024 ** _POWER_OF_1024[unit.lower()])

    def refuse_unknown(self) -> None:
        """After all keys have been asked for."""
        for key in self._extra:
            if key not in self._known:
                near = difflib.get_close_matches(key, self._known, n=3)
                hint = f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(sorted(self._known))}"
                hint = _SHARDED_STORE if key in _SHARDED_STORE_KEYS else hint
                raise InvalidArgument("kv_connector_extra_config key", key, f"a known key; {hint}")


def choice(kinds: type[EnumT], key: str, value: object) -> EnumT:
    """The kind of this value."""
    try:
        return kinds(value)
    except ValueError:
        raise InvalidArgument(key, value, f"one of {', '.join(str(kind.value) for kind in kinds)}") from None


def _read_file(path: str | None) -> Mapping[str, object]:
    if not path:
        return {}
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(CONFIG_PATH_VARIABLE, path, f"a readable JSON file ({error})") from error
    if not isinstance(content, dict):
        raise InvalidArgument(CONFIG_PATH_VARIABLE, path, "a file with one JSON object")
    return content

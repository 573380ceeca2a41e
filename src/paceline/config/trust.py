"""Which code a run folder names, and whether it may be executed without asking.

A run file whose name somebody types is theirs. A run folder may come from anywhere, with anybody's code: a workload
`file.py:Class`, a script, a function. It is executed if this user made the folder, which `origin.json` in it proves
with a key that only this user has, or if this user has trusted it once (`--trust`).
"""

import hashlib
import hmac
import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from paceline.config.registry import BUILT_IN, DEFAULT_WORKLOAD, MAIN, find_entry, find_installed
from paceline.errors import UserError
from paceline.io.safe_yaml import load_yaml, read_yaml_text

ORIGIN = "origin.json"
KEY_BYTES = 32
KERAS = ".keras"  # a file of layers that Keras builds by name; its safe mode has been bypassed more than once
NOWHERE = "/nonexistent"
MAX_NESTING = 5  # of run files that name run files
MAX_BYTES = 100_000  # of an `origin.json`


def get_state_folder() -> Path:
    """Return this user's state folder; never below the current folder, which may have come from anywhere."""
    named, home = os.environ.get("XDG_STATE_HOME", ""), os.path.expanduser("~/.local/state")
    return Path(named if os.path.isabs(named) else home if os.path.isabs(home) else NOWHERE) / "paceline"


def find_user_code(values: Mapping[str, Any], folder: Path = Path(), depth: int = 0) -> list[str]:
    """Return the user code that a spec names, without executing any; `folder` has the run files that it names."""
    workload = str(values.get("workload", DEFAULT_WORKLOAD))
    if workload not in BUILT_IN and workload not in find_installed():
        return [workload]
    found: list[str] = []
    for section, kind in find_entry(workload).sections().items():
        inside = values.get(section)
        given = {kind.word: inside} if isinstance(inside, str) else inside if isinstance(inside, Mapping) else {}
        named = [text for key in kind.references if isinstance(text := given.get(key), str)]
        found += [text for text in named if ":" in text or text.endswith(KERAS)]
        files = [file for key in kind.run_files for file in given.get(key) or () if isinstance(file, str)]
        found += [text for file in files for text in _find_code_in_file(folder / file, depth + 1)]
    return found


def _find_code_in_file(file: Path, depth: int) -> list[str]:
    """Return the code that a run file named by a spec executes; none if it cannot be read."""
    if depth > MAX_NESTING:
        return [str(file)]
    with suppress(OSError, ValueError, RuntimeError, yaml.YAMLError):
        if isinstance(values := load_yaml(read_yaml_text(file.expanduser())), dict):
            return [
                resolve_reference(text, file.resolve().parent)
                for text in find_user_code(values, file.resolve().parent, depth)
            ]
    return []


def resolve_reference(reference: str, folder: Path) -> str:
    """Return a reference with the file of `file.py:name` made absolute; the name of an installed module stays."""
    module, colon, name = reference.rpartition(":") if ":" in reference else (reference, "", "")
    if module == MAIN:
        return reference
    known = module.endswith(".py") or not colon
    file = folder / (module if known else module.replace(".", "/") + ".py")
    return f"{file.resolve()}{colon}{name}" if file.is_file() else reference


def sign_run_folder(folder: Path, values: Mapping[str, Any]) -> str | None:
    """Return the content of `origin.json` of a new run folder; None if the run has no user code, or there is no key."""
    if not (code := find_user_code(values)) or (key := _read_key()) is None:
        return None
    made = {"user": os.getuid(), "host": socket.gethostname(), "code": code}
    return json.dumps({**made, "mark": _sign_origin(key, made)}, indent=1) + "\n"


def check_trusted(folder: Path, values: Mapping[str, Any], names_from: Path = Path()) -> None:
    """Raise UserError if this would execute code that came with a run folder from elsewhere."""
    code = find_user_code(values, names_from)
    if code and not _is_made_here(folder, code) and not _trust_file(folder, code).is_file():
        raise UserError(
            f"{folder} was not made by you here, and this would execute {code[0]}; read that and, if you trust it, "
            f"add  --trust  once, or in Python call  paceline.trust({str(folder)!r})",
            code="not-trusted",
            key=code[0],
        )


def remember_trust(folder: Path, values: Mapping[str, Any]) -> None:
    """Trust the code that this folder names today, from now on."""
    if not (code := find_user_code(values)):
        return
    note = _trust_file(folder, code)
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps({"folder": str(folder.resolve()), "code": code}, indent=1) + "\n", encoding="utf-8")


def _trust_file(folder: Path, code: Sequence[str]) -> Path:
    name = hashlib.sha256(json.dumps([str(folder.resolve()), *code]).encode()).hexdigest()
    return get_state_folder() / "trusted" / f"{name}.json"


def _is_made_here(folder: Path, code: Sequence[str]) -> bool:
    made, key = _read_origin(folder), _read_key()
    mark = made.pop("mark", None)
    if key is None or not isinstance(mark, str) or made.get("code") != list(code):
        return False
    return hmac.compare_digest(mark.encode(errors="replace"), _sign_origin(key, made).encode())


def _read_origin(folder: Path) -> dict[str, Any]:
    file = folder / ORIGIN
    with suppress(OSError, ValueError, RecursionError):
        if file.is_file() and file.stat().st_size <= MAX_BYTES:
            made = json.loads(file.read_text(encoding="utf-8"))
            return made if isinstance(made, dict) else {}
    return {}


def _sign_origin(key: bytes, made: Mapping[str, Any]) -> str:
    return hmac.new(key, json.dumps(made, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _read_key() -> bytes | None:
    """Return this user's secret, made when first needed; None if it cannot be stored."""
    file = get_state_folder() / "key"
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f".key.{os.getpid()}.{os.urandom(4).hex()}")
        if not file.exists():
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(os.urandom(KEY_BYTES))
            with suppress(FileExistsError):
                os.link(beside, file)  # whole, and the first of several processes wins
            beside.unlink()
        key = file.read_bytes()
        return key if len(key) == KEY_BYTES else None
    return None

"""Code that a run folder names, and whether it may be executed without asking.

A run file whose name somebody types is theirs. A run folder may have come from anywhere, with code of anybody's: a
workload `file.py:Class`, a script, a function. It is executed where this user made the folder, which `origin.json` in
it proves by a key that only this user has, or where this user has said so once (`--trust`).
"""

from __future__ import annotations

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

from paceline.config.registry import BUILT_IN, DEFAULT_WORKLOAD, find_entry, find_installed
from paceline.errors import UserError
from paceline.io.safe_yaml import load_yaml, read_yaml_text

ORIGIN = "origin.json"
KEY_BYTES = 32
BUILDING = ".keras"
"""A file of layers that Keras builds by their names: as data, but more than one way around that was found."""
NOWHERE = "/nonexistent"
"""The home of a user who has none: nothing can be kept there."""
DEEPEST = 5
"""Run files that name run files."""
MOST_BYTES = 100_000
"""Of an `origin.json`."""


def get_state_folder() -> Path:
    """What belongs to this user and to no run: never below the current folder, which may have come from anywhere."""
    named, home = os.environ.get("XDG_STATE_HOME", ""), os.path.expanduser("~/.local/state")
    return Path(named if os.path.isabs(named) else home if os.path.isabs(home) else NOWHERE) / "paceline"


def find_user_code(values: Mapping[str, Any], folder: Path = Path(), depth: int = 0) -> list[str]:
    """The code of somebody's own that a spec names, none of which is executed to find out.

    `folder` is where a run file is looked for that it names.
    """
    workload = str(values.get("workload", DEFAULT_WORKLOAD))
    if workload not in BUILT_IN and workload not in find_installed():
        return [workload]
    found: list[str] = []
    for section, kind in find_entry(workload).sections().items():
        inside = values.get(section)
        given = {kind.word: inside} if isinstance(inside, str) else inside if isinstance(inside, Mapping) else {}
        named = [text for key in kind.references if isinstance(text := given.get(key), str)]
        found += [text for text in named if ":" in text or text.endswith(BUILDING)]
        files = [file for key in kind.run_files for file in given.get(key) or () if isinstance(file, str)]
        found += [text for file in files for text in _code_of_file(folder / file, depth + 1)]
    return found


def _code_of_file(file: Path, depth: int) -> list[str]:
    """The same of a run file that a spec names. One that cannot be read is refused later, and executes nothing."""
    if depth > DEEPEST:
        return [str(file)]
    with suppress(OSError, ValueError, RuntimeError, yaml.YAMLError):
        if isinstance(values := load_yaml(read_yaml_text(file.expanduser())), dict):
            return [
                resolve_reference(text, file.resolve().parent)
                for text in find_user_code(values, file.resolve().parent, depth)
            ]
    return []


def resolve_reference(reference: str, folder: Path) -> str:
    """`file.py:name`, or a file alone, from anywhere; the name of an installed module stays what it is."""
    module, colon, name = reference.rpartition(":") if ":" in reference else (reference, "", "")
    known = module.endswith(".py") or not colon
    file = folder / (module if known else module.replace(".", "/") + ".py")
    return f"{file.resolve()}{colon}{name}" if file.is_file() else reference


def sign_run_folder(folder: Path, values: Mapping[str, Any]) -> str | None:
    """What `origin.json` of a new run folder says; None where the run has no code of its own, or there is no key."""
    if not (code := find_user_code(values)) or (key := _key()) is None:
        return None
    made = {
        "user": os.getuid(),
        "host": socket.gethostname(),
        "machine": _machine(),
        "path": str(folder.resolve()),
        "code": code,
    }
    return json.dumps({**made, "mark": _mark(key, made)}, indent=1) + "\n"


def check_trusted(folder: Path, values: Mapping[str, Any], names_from: Path = Path()) -> None:
    """A UserError where this would execute code that came with a run folder from elsewhere."""
    code = find_user_code(values, names_from)
    if code and not _made_here(folder, code) and not _remembered(folder, code).is_file():
        raise UserError(
            f"{folder} {_maker(folder)}, and this would execute {code[0]}; read that and, if you trust it, add  "
            f"--trust  once, or in Python call  paceline.trust({str(folder)!r})"
        )


def remember_trust(folder: Path, values: Mapping[str, Any]) -> None:
    """From now on this user executes the code that this folder names today."""
    if not (code := find_user_code(values)):
        return
    note = _remembered(folder, code)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps({"folder": str(folder.resolve()), "code": code}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--trust cannot be remembered: {note.parent} cannot be written: {error.strerror}") from None


def _remembered(folder: Path, code: Sequence[str]) -> Path:
    name = hashlib.sha256(json.dumps([str(folder.resolve()), *code]).encode()).hexdigest()
    return get_state_folder() / "trusted" / f"{name}.json"


def _made_here(folder: Path, code: Sequence[str]) -> bool:
    made, key = _origin(folder), _key()
    mark = made.pop("mark", None)
    if key is None or not isinstance(mark, str) or made.get("code") != list(code):
        return False
    return hmac.compare_digest(mark.encode(errors="replace"), _mark(key, made).encode())


def _maker(folder: Path) -> str:
    made = _origin(folder)
    if not isinstance(host := made.get("host"), str) or not isinstance(user := made.get("user"), int):
        return "does not say who made it"
    return f"says that it was made by user {user} on {host}, not by you here"


def _origin(folder: Path) -> dict[str, Any]:
    file = folder / ORIGIN
    with suppress(OSError, ValueError, RecursionError):
        if file.is_file() and file.stat().st_size <= MOST_BYTES:
            made = json.loads(file.read_text(encoding="utf-8"))
            return made if isinstance(made, dict) else {}
    return {}


def _mark(key: bytes, made: Mapping[str, Any]) -> str:
    return hmac.new(key, json.dumps(made, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _key() -> bytes | None:
    """This user's secret, made when it is first needed; None where it cannot be kept."""
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


def _machine() -> str:
    """This machine among others; its id itself is not for other people's eyes."""
    with suppress(OSError):
        return hashlib.sha256(b"paceline" + Path("/etc/machine-id").read_bytes()).hexdigest()[:16]
    return ""

"""The recipes of connector/deploy, read as those read them who start them: systemd, a shell, Kubernetes."""

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support import PROJECT

DEPLOY = PROJECT / "connector" / "deploy"


def command_of(unit):
    """What a systemd unit starts, word by word."""
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str
    parser.read_string(unit.read_text(encoding="utf-8").replace("\\\n", " "))
    return shlex.split(parser["Service"]["ExecStart"])


def copied(folder, changes):
    """A copy of connector/deploy in the folder, with other addresses, ports and sizes: {text: what is in its place}."""
    there, old = folder / "deploy", re.compile("|".join(map(re.escape, changes)))
    shutil.copytree(DEPLOY, there)
    for path in there.rglob("*"):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            path.write_text(old.sub(lambda match: changes[match[0]], text), encoding="utf-8")
    return there


def engine_of(deploy, mooncake, transfer, folder):
    """What engine.sh starts: (arguments, kv_transfer_config, environment). A program that only tells is its vLLM."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    vllm = programs / "vllm"
    vllm.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps([sys.argv[1:], {n: os.environ[n] for n in ('MOONCAKE_CONFIG_PATH', 'PYTHONHASHSEED')}]))\n"
    )
    vllm.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    told = subprocess.run(
        [deploy / "engine.sh", deploy / mooncake, deploy / transfer, "MODEL", "--port", "8000"],
        env={**environment, "PATH": f"{programs}:/usr/bin:/bin"},
        check=True,
        capture_output=True,
        text=True,
        timeout=20,
    )
    (*arguments, flag, config), started_with = json.loads(told.stdout)
    assert flag == "--kv-transfer-config"
    return arguments, json.loads(config), started_with


def installed(command):
    """A command of a recipe, where its program is installed here."""
    return [str(Path(sys.executable).with_name(Path(command[0]).name)), *command[1:]]

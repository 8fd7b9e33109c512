"""Runs the instructions of a Dockerfile without a container engine: each stage in a folder of its own, by chroot.

What it needs: root, debootstrap, unshare, and a Debian mirror. What this is not: there are no layers, no cgroups and no
seccomp, a stage's base is a Debian of debootstrap's with its Python instead of the image that FROM names, HEALTHCHECK,
VOLUME, EXPOSE and LABEL are read and not carried out, and pip and apt find packages the way this machine does.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pathspec
from dockerfile_parse import DockerfileParser

PACKAGES = "python3,python3-venv,ca-certificates"
"""Packages that the base of the CPU image, Python's slim image, has beyond a minimal Debian."""


def make_base(root: Path, suite: str = "bookworm") -> None:
    """A minimal Debian in ``root``; a few minutes."""
    if not (root / "usr/bin/python3").exists():
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(root)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@dataclass
class Stage:
    """One stage: its files, and what ENV, ARG, WORKDIR, USER, ENTRYPOINT and CMD have said."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def shell(self, script: str, *, sealed: bool = False) -> list[str]:
        """The command that runs ``script`` inside.

        sealed: as a strict cluster would: the root cannot be written to but for the folders that the chart mounts, and
        there is no network but a loopback interface of its own.
        """
        mounts = []
        if sealed:
            uid, gid = self.user.split(":")
            mounts += [f"mount --bind {self.root} {self.root}", f"mount -o remount,bind,ro {self.root}"]
            mounts += [
                f"mount -t tmpfs -o uid={uid},gid={gid} tmpfs {self.root}{folder}"
                for folder in ("/tmp", "/home/kvmerge", "/models")
            ]
        mounts.append(f"mount -t proc proc {self.root}/proc")
        mounts += [f"mount --rbind {folder} {self.root}{folder}" for folder in ("/dev", "/sys")]
        for path in [] if sealed else _local_indexes():
            target = f"{self.root}{path}"
            mounts.append(f"mkdir -p {target} && mount --bind {path} {target}")
        variables = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root", **self.env}
        if self.user != "0:0":
            variables["HOME"] = "/home/kvmerge"
        else:
            variables |= self.args | ({} if sealed else _pip_variables())
        inside = shlex.join(
            ["chroot", f"--userspec={self.user}", str(self.root), "env", "-i"]
            + [f"{name}={value}" for name, value in variables.items()]
            + ["sh", "-ec", f"cd {self.folder}; {script}"]
        )
        network = ["ip link set lo up"] if sealed else []
        script = " && ".join([*mounts, *network, f"exec {inside}"])
        return ["unshare", "--mount", *(["--net"] if sealed else []), "bash", "-c", script]

    def run(self, script: str, *, sealed: bool = False) -> str:
        """Output of the script; AssertionError with the end of it if it fails."""
        done = subprocess.run(self.shell(script, sealed=sealed), capture_output=True, text=True)
        assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout


def build(dockerfile: Path, context: Path, base: Path, target: Path, args: dict[str, str]) -> Stage:
    """Carries out all stages of ``dockerfile``, below ``target``; returns the last. ``args`` are build arguments."""
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    parser = DockerfileParser(fileobj=dockerfile.open("rb"))
    for step in parser.structure:
        kind, value = step["instruction"], step["value"]
        if kind in ("COMMENT", "ARG") and stage is None:
            continue
        if kind == "FROM":
            words = value.split()
            name = words[2] if words[1:2] == ["AS"] else "final"
            root = target / name
            if root.exists():
                shutil.rmtree(root)
            subprocess.run(["cp", "-a", "--reflink=auto", str(base), str(root)], check=True)
            # The mirror and how to reach it are this machine's.
            for path in ("etc/resolv.conf", "etc/hosts", "etc/ssl/certs/ca-certificates.crt"):
                if Path("/", path).exists():
                    shutil.copy(Path("/", path), root / path)
            stage = stages[name] = Stage(root)
            continue
        assert stage is not None
        if kind == "RUN":
            stage.run(value)
        elif kind == "COPY":
            _copy(shlex.split(value), stage, stages, context)
        elif kind == "ENV":
            stage.env |= dict(word.split("=", 1) for word in shlex.split(value))
        elif kind == "ARG":
            name, _, default = value.partition("=")
            stage.args[name] = args.get(name, default)
        elif kind == "WORKDIR":
            stage.folder = value
            (stage.root / value.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif kind == "USER":
            stage.user = value
        elif kind == "ENTRYPOINT":
            stage.entrypoint = json.loads(value)
        elif kind == "CMD":
            stage.command = json.loads(value)
        else:
            assert kind in ("LABEL", "VOLUME", "EXPOSE", "HEALTHCHECK", "COMMENT"), f"{kind} is not known here"
    assert stage is not None
    return stage


def _copy(words: list[str], stage: Stage, stages: dict[str, Stage], context: Path) -> None:
    source_root = context
    if words[0].startswith("--from="):
        source_root = stages[words.pop(0).removeprefix("--from=")].root
    *sources, destination = words
    folder = destination if destination.startswith("/") else os.path.join(stage.folder, destination)
    target = stage.root / folder.lstrip("/")
    for source in sources:
        path = source_root / source.lstrip("/")
        if path.is_dir():
            if source_root == context:
                is_ignored = ignored(context).match_file
                for file in sorted(p for p in path.rglob("*") if p.is_file()):
                    if not is_ignored(file.relative_to(context).as_posix()):
                        place = target / file.relative_to(path)
                        place.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy(file, place)
            else:
                target.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-a", f"{path}/.", str(target)], check=True)
        else:
            assert source_root != context or not ignored(context).match_file(source), f"{source} is in .dockerignore"
            place = target / path.name if destination.endswith("/") else target
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)


def ignored(context: Path) -> pathspec.GitIgnoreSpec:
    """What .dockerignore leaves out of the context: patterns begin at its root, unlike those of .gitignore."""
    lines = (context / ".dockerignore").read_text().splitlines()
    return pathspec.GitIgnoreSpec.from_lines(re.sub(r"^(!?)(?=[^#])", r"\1/", line) for line in lines)


def _pip_variables() -> dict[str, str]:
    """Settings with which pip finds packages here; its paths of files and of certificates hold inside as well."""
    listed = subprocess.run(["pip", "config", "list"], capture_output=True, text=True, check=True).stdout
    found = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        option = name.split(".", 1)[1].upper().replace("-", "_")
        found[f"PIP_{option}"] = value.strip("'").replace("\\n", " ")
    return found


def _local_indexes() -> list[str]:
    """Folders that pip's settings name."""
    words = " ".join(_pip_variables().values()).replace("file://", "").split()
    folders = {"/" + "/".join(word.split("/")[1:3]) for word in words if word.startswith("/")}
    return sorted(folder for folder in folders if Path(folder).is_dir())

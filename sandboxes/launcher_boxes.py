"""What the launcher process keeps of each sandbox between commands: mounts, control groups, the session.

Runs inside the launcher process: standard library only, no tollway imports but its siblings there.
"""

from __future__ import annotations

import os

from tollway.sandboxes import cgroups
from tollway.sandboxes.launcher_command import Head
from tollway.sandboxes.mounts import Mounts, Space
from tollway.sandboxes.session import Session

__all__ = ["Box", "Boxes"]


class Box:
    """One sandbox."""

    def __init__(self, name: str, space: Space | None, limits: cgroups.GroupLimits | None) -> None:
        self.name, self.space, self.limits = name, space, limits
        self.group: cgroups.Group | None = None
        self.session: Session | None = None


class Boxes:
    """All of them, and what this machine allows."""

    def __init__(self, settings: Head) -> None:
        """Take what an earlier launcher made and find out what can be mounted and grouped."""
        self.forbidden = ""
        """Why nothing can be mounted."""
        self._mounts: Mounts | None = None
        self._places: tuple[cgroups.Place, ...] = ()
        self._owner = f"tollway-{os.getuid()}-{os.getpid()}"
        if settings.get("mounts"):
            namespace = settings.get("user_namespace")
            try:
                self._mounts = Mounts(namespace if isinstance(namespace, int) else None)
            except OSError as error:
                self.forbidden = str(error)
        if settings.get("cgroups"):
            self._places = cgroups.find()
            cgroups.sweep(self._places)
        self._boxes: dict[str, Box] = {}
        adopted = settings.get("boxes")
        for name, (namespace, limits) in (adopted if isinstance(adopted, dict) else {}).items():
            self._boxes[name] = Box(name, Space(namespace) if namespace >= 0 else None, _limits(limits))

    @property
    def facts(self) -> Head:
        """For the greeting."""
        return {
            "mounts": self._mounts is not None,
            "forbidden": self.forbidden,
            "controllers": [each for place in self._places for each in place.controllers],
        }

    def get(self, name: object) -> Box | None:
        """The sandbox of that name."""
        return self._boxes.get(str(name))

    def make(self, head: Head) -> Head:
        """Make one; says where its parts are. Raises ``OSError`` and leaves nothing."""
        name, mount = str(head["box"]), head["mount"]
        space = None
        if isinstance(mount, dict) and self._mounts is not None:
            space = self._mounts.make(**mount)
        self._boxes[name] = Box(name, space, _limits(head["limits"]))
        if space is None:
            return {}
        places = {"directory": space.directory, "namespace": space.namespace}
        answer: Head = {key: (fd, os.fstat(fd).st_dev, os.fstat(fd).st_ino) for key, fd in places.items()}
        return answer | {"workspace": space.workspace, "binds": space.binds}

    def forget(self, name: object) -> Box | None:
        """No longer known by name; ``clear`` comes when its processes have ended."""
        return self._boxes.pop(str(name), None)

    def clear(self, box: Box) -> Head:
        """Let go of its mounts and groups; there is nothing to say about it."""
        if box.space is not None:
            box.space.close()
        if box.group is not None:
            box.group.remove()
        return {}

    def group(self, box: Box | None) -> cgroups.Group | None:
        """Its control groups, made when its first process starts."""
        if box is None or box.limits is None or not self._places:
            return None
        if box.group is None:
            box.group = cgroups.Group(self._places, self._owner, box.name, box.limits)
        return box.group

    def close(self) -> None:
        """Remove all groups; their processes are dead."""
        cgroups.remove_place(self._places, self._owner)


def _limits(value: object) -> cgroups.GroupLimits | None:
    return cgroups.GroupLimits(*value) if isinstance(value, list) else None

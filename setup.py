"""Ship the root folders as subpackages of ``tollway`` (docs/adr/0001-root-folders.md)."""

from setuptools import find_packages, setup

FOLDERS = ("session_server", "router", "engine", "envs", "sandboxes", "trainer")
found = find_packages(".", include=[pattern for name in FOLDERS for pattern in (name, f"{name}.*")])
setup(
    packages=["tollway", *(f"tollway.{name}" for name in found)],
    package_dir={"tollway": "src/tollway", **{f"tollway.{name}": name for name in FOLDERS}},
    package_data={
        "tollway": ["py.typed"],
        "tollway.envs.swe": ["bundled/**/*", "shipped/**/*", "tiny/**/*"],
    },
)

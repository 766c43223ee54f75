# The one thing pyproject.toml cannot say: found packages, plus a mapped one.
from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["hf_memsave*"], exclude=["*.tests", "*.tests.*", "hf_memsave._vendor*"]),
        "hf_memsave.configs",
    ],
    py_modules=["hf_memsave_cli"],
    package_dir={"hf_memsave.configs": "configs"},
)

"""The wheel that scripts/wheel.sh makes, installed into an empty environment without a network, works from there alone, for
another user (where this one is root): program, plugins, tools, Python and SDK.

QUERN_BUILD_DIR names a build folder in which everything is built.
"""

import os
import pwd
import re
import shutil
import subprocess
import tempfile
import unittest
import venv
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("QUERN_BUILD_DIR", SOURCE / "build" / "release"))
THREE_LINES = """\
import quern
with quern.Run(quern.Config.load("demo.toml").set("log.directory", "runs/three")) as run:
    print(*(step.loss for step in run))
"""


class WheelTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.folder.chmod(0o755)
        cls.environment = cls.folder / "environment"
        venv.create(cls.environment)
        cls.cuda = (BUILD / "plugins/device/libquern_cuda.so").exists()
        cls.run_here(SOURCE / "scripts/wheel.sh", "--build", BUILD, "--quick", *([] if cls.cuda else ["--no-cuda"]),
                     cls.folder / "dist")
        cls.wheel, = (cls.folder / "dist").glob("*.whl")
        cls.run_here(SOURCE / ".venv/bin/python", "-m", "pip", "--python", cls.environment / "bin/python", "install", "--quiet",
                     "--disable-pip-version-check", "--no-index", "--no-compile", "--find-links", SOURCE / ".venv/wheels", cls.wheel)
        cls.work = cls.folder / "work"
        cls.work.mkdir()
        cls.user = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            cls.user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            os.chown(cls.work, nobody.pw_uid, nobody.pw_gid)
        cls.prefix = Path(cls.run_in(cls.work, "python", "-c", "import quern; print(quern.prefix())").strip())
        pages = sorted((cls.prefix / "share/quern/docs").glob("*.md"))
        (cls.work / "text.txt").write_text("\n\n".join(page.read_text() for page in pages))
        cls.run_in(cls.work, "quern-tools", "tokenize", "text.txt", "--train-bpe", "512", "-o", "data")
        demo = (cls.prefix / "share/quern/configs/demo.toml").read_text().replace("data/austen", "data")
        for found, small in (("steps = 1100", "steps = 8"), ("micro_batch = 8", "micro_batch = 2"), ("warmup = 60", "warmup = 1"),
                             ("every = 25", "every = 1")):
            assert found in demo
            demo = demo.replace(found, small)
        (cls.work / "demo.toml").write_text(demo)

    @staticmethod
    def run_here(*words):
        result = subprocess.run(list(map(str, words)), capture_output=True, text=True)
        assert result.returncode == 0, f"{words}: {result.returncode}\n{result.stdout}{result.stderr}"

    @classmethod
    def run_in(cls, folder, program, *words):
        """Standard output of a program of the environment, which knows of no other folder."""
        variables = {"PATH": f"{cls.environment}/bin:/usr/bin:/bin", "HOME": str(cls.work), "OMP_NUM_THREADS": "2"}
        result = subprocess.run([program, *map(str, words)], cwd=folder, env=variables, capture_output=True, text=True, **cls.user)
        assert result.returncode == 0, f"{program} {words}: {result.returncode}\n{result.stdout}{result.stderr}"
        return result.stdout

    def quern(self, *words):
        return self.run_in(self.work, "quern", *words)

    def losses_fall(self, losses):
        self.assertEqual(len(losses), 8)
        self.assertGreater(losses[0], 7)  # a guess over 4096 tokens costs 8.3 nats
        self.assertLess(losses[-1], losses[0] - 0.5)

    def test_the_size(self):
        self.assertLess(self.wheel.stat().st_size, 200e6)

    def test_the_program_trains_the_demo_which_it_plans(self):
        self.assertIn("parameters", self.quern("plan", "demo.toml"))
        lines = self.quern("train", "demo.toml").splitlines()
        self.losses_fall([float(line.split()[3]) for line in lines if line.startswith("step ")])
        self.assertTrue((self.work / "runs/demo/export/model.safetensors").is_file())
        with self.assertRaisesRegex(AssertionError, f"gguf: not installed for {self.environment}"):  # by its own tools
            self.quern("export", "runs/demo", "demo.gguf", "--to", "gguf")

    def test_three_lines_of_python_train_it(self):
        self.losses_fall(list(map(float, self.run_in(self.work, "python", "-c", THREE_LINES).split("\n")[-2].split())))

    def test_plugins_are_loaded_and_checked_from_there(self):
        self.assertTrue(self.prefix.is_relative_to(self.environment))
        found = self.quern("plugins", "list").splitlines()
        for line in found:
            if "(built in)" not in line and "libquern_" in line:
                self.assertIn(str(self.prefix), line)
        for line in found:  # what a machine has or not is named
            if "CANNOT BE LOADED" in line:
                self.assertRegex(line, r"not here: found lib(mpi|cu|nccl|nvrtc)\S*: cannot open .*install it")
        self.assertGreater(len([line for line in found if str(self.prefix / "lib/quern/plugins") in line]), 9)
        self.assertIn("0 broken", self.quern("plugins", "check", "precision/fp32"))

    def test_every_library_is_from_there_or_the_systems(self):
        site = self.prefix.parents[1]
        files = [path for path in site.glob("quern*/**/*") if path.is_file()
                 and not path.is_symlink() and path.read_bytes()[:4] == b"\x7fELF"]
        self.assertGreater(len(files), 15)
        for path in files:
            headers = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
            for line in headers.splitlines():
                if "RUNPATH" in line or "RPATH" in line:
                    self.assertTrue(all(part.startswith("$ORIGIN") for part in line.split("[")[1].rstrip("]").split(":")), line)
            if "libcudart" in headers:
                listed = re.search(r"R(?:UN)?PATH.*\[(.*)\]", headers)[1].replace("$ORIGIN", str(path.parent)).split(":")
                folders = {os.path.normpath(folder) for folder in listed}
                self.assertLessEqual({f"{site}/nvidia/{package}/lib" for package in ("cu13", "cudnn", "nccl")}, folders)
            if any(f"[lib{name}" in headers for name in ("mpi", "cudart", "nccl")):
                continue
            for line in subprocess.run(["ldd", path], env={}, capture_output=True, text=True).stdout.splitlines():
                self.assertNotIn("not found", line, path)
                name, _, place = line.strip().partition(" => ")
                if place.startswith("/lib"):  # part of every Linux
                    self.assertRegex(name, r"^lib(c|m|gcc_s|stdc\+\+|dl|pthread|rt|z|mvec)\.so")
                elif place:
                    self.assertTrue(place.startswith(str(self.environment)), line)

    def test_a_plugin_is_built_against_it(self):
        shutil.copytree(self.prefix / "share/quern/examples/solo", self.work / "solo")
        for words in (("-S", "solo", "-B", "built", f"-DCMAKE_PREFIX_PATH={self.prefix}", "-DQUERN_TESTS=OFF", "-G", "Ninja"),
                      ("--build", "built")):
            self.run_in(self.work, "cmake", *words)
        plugin, = (self.work / "built/plugins/communicator").glob("*.so")
        self.assertIn("communicator solo", self.quern("plugins", "info", "communicator", "solo", "--path", plugin))


if __name__ == "__main__":
    unittest.main()

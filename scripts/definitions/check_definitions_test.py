"""The check of definitions: what it finds, that the tree has none, and that libquern shows names of its own alone."""

import os
import subprocess
import unittest
from pathlib import Path

import check_definitions
from folder_test_case import FolderTestCase


class DefinitionsTest(FolderTestCase):
    def found(self, files):
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return check_definitions.clashes(self.folder)

    def test_types_of_one_name_in_one_program_are_found(self):
        plan = "namespace quern {\n\nenum class Run : int { first };\n\n}\n"
        compare = "namespace quern {\nclass Other;\nstruct Run {\n  int x;\n};\n}\n"
        clash = ["quern::Run: defined at core/src/plan/run.h:3 and at frontends/ab/run.cpp:3"]
        self.assertEqual(self.found({"core/src/plan/run.h": plan, "frontends/ab/run.cpp": compare}), clash)

    def test_what_is_apart_is_not(self):
        unnamed = 'namespace quern {\nnamespace {\nstruct Run {\n  const char* x = "{";\n};\n}  // namespace\n}\n'
        other = "namespace quern::ab {\ntemplate <class T>\nstruct Run final : Base {};\nvoid f() {\n  struct Local {};\n}\n}\n"
        alike = "namespace quern::mine {\nstruct Options {\n  struct Inner {};\n};\nstruct Options make(struct Options) {\n}\n}\n"
        files = {"core/src/a.h": "namespace quern {\nstruct Run {};\nstruct Run;\n}\n", "core/src/b.cpp": unnamed, "core/src/c.h": other}
        files |= {f"plugins/model/{name}/options.h": alike for name in ("one", "two")}
        self.assertEqual(self.found(files), [])

    def test_the_tree_has_none(self):
        self.assertEqual(check_definitions.clashes(check_definitions.ROOT), [])

    def test_libquern_shows_names_of_its_own_alone(self):
        library = Path(os.environ["QUERN_BUILD_DIR"]) / "lib" / "libquern.so"
        said = subprocess.run(["nm", "-DC", "--defined-only", library], check=True, capture_output=True, text=True).stdout
        names = [line.split(" ", 2)[2] for line in said.splitlines()]
        kinds = ("typeinfo for ", "typeinfo name for ", "vtable for ", "VTT for ", "guard variable for ", "")
        own = tuple(kind + "quern::" for kind in kinds)
        self.assertGreater(len(names), 100)
        self.assertEqual([name for name in names if not name.startswith(own)], [])


if __name__ == "__main__":
    unittest.main()

"""Prints cnorm_names.h: a macro for each entry of the list cnorm_entries.inc."""

import re
import sys
from pathlib import Path

print("/* written by names.py from cnorm_entries.inc, for cnorm_python.h */")
for name in re.findall(r"^ENTRY\((\w+)\)$", Path(sys.argv[1]).read_text(), re.M):
    print(f"#define {name} (*cnorm_loaded.{name})")

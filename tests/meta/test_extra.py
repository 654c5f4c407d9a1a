"""The error of `qcomp.testing` if its extra is not installed."""

import subprocess
import sys


def test_without_hypothesis_the_extra_is_named():
    code = "import sys; sys.modules['hypothesis'] = None\nimport importlib.util as u\n"
    code += "u.find_spec, real = (lambda n, p=None: None if n == 'hypothesis' else real(n, p)), u.find_spec\n"
    code += "import qcomp\ntry:\n    qcomp.testing\nexcept ImportError as error:\n    print(error)\n"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "pip install 'qcomp[testing]'" in found.stdout

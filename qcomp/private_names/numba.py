"""Undocumented names of numba that qcomp uses; versions 0.61 to 0.68 have all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numba

from qcomp.private_names import require

_require = partial(require, library="numba", versions=">=0.61,<0.69")
_caching = _require(numba.core, "caching", "store compiled kernels")
_FunctionCache = _require(_caching, "FunctionCache", "store compiled kernels")
_Files = _require(_caching, "CompileResultCacheImpl", "store compiled kernels")
for _owner, _name in ((_FunctionCache, "_impl_class"), (_Files, "_locator_classes")):
    _require(_owner, _name, "choose the folder of compiled kernels")
_require(_FunctionCache, "_index_key", "store compiled kernels")


def cache_of(function: Callable[..., Any], locator: type | None) -> Any:
    """Return a compiled function's cache on disk, which has a ``cache_path``.

    ``locator`` is a class with the methods of numba's locators, which says where the files are; without it, the user's
    settings do. Raises RuntimeError, whose message has the word "locator", if there is no place for the files.
    """
    members: dict[str, Any] = {"_index_key": _index_key}
    if locator is not None:
        members["_impl_class"] = type("_Files", (_Files,), {"_locator_classes": (locator,)})
    return type("_Cache", (_FunctionCache,), members)(function)


def _index_key(_: Any, signature: Any, codegen: Any) -> Any:
    """Return the key that distinguishes functions with the same name and file.

    numba's own key also has the pickles of the functions in a closure, which differ between processes.
    """
    return signature, codegen.magic_tuple()


def use_cache(dispatcher: Any, cache: Any) -> None:
    """Let a function that is not compiled yet use a cache."""
    _require(dispatcher, "_cache", "store compiled kernels")
    dispatcher._cache = cache


def value_of(struct: Any) -> Any:
    """Return the LLVM value of a struct in an intrinsic."""
    return _require(struct, "_getvalue", "change an argument of a kernel")()

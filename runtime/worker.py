"""Methods that vLLM mixes into its worker: what the driver can ask of a block at work."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any


class WorkerExtension:
    """Named by ``worker_extension_cls``; every method is called by name through ``collective_rpc``."""

    def vtaps_handshake(self) -> dict[str, Any]:
        """What this worker serves: block digest, structure, locations installed, pid; and what there is without a
        block: rank, vLLM's version, what was compiled."""
        from vtaps.runtime import handshake
        from vtaps.runtime.compat.attention import facts
        from vtaps.runtime.compat.vllm_0_32 import compiled
        from vtaps.spec.vllm_version import installed

        told: dict[str, Any] = {
            "rank": getattr(self, "rank", 0),
            "vllm": (installed() or ("", ""))[1],
            "compiled": compiled(),
        }
        session = getattr(self, "vtaps_session", None)
        if session is None:
            return told
        placed = {p for entry in session.program.patterns.values() for p, _, _ in entry.sites.values()}
        # Of a pipeline another stage says it.
        here = placed if session.ranks is None else placed & session.modules.keys()
        attention = {p: facts(session.modules.get(p)) for p in sorted(here)}
        return {**told, **handshake.told(session), "attention": attention}

    def vtaps_prove(self) -> dict[str, Any]:
        """Prove that every recorded tap fires; see :mod:`vtaps.runtime.compat.proof`.  ``error`` says which does
        not."""
        from vtaps.runtime.compat.proof import ProofError, prove

        try:
            return prove(self)
        except ProofError as error:
            return {"error": str(error)}

    def vtaps_load(self, manifest: str) -> str:
        """Go on with the lock and block of another manifest; returns why not, or nothing."""
        from pathlib import Path

        from vtaps.runtime.hooks import BlockFault
        from vtaps.runtime.manifest import Manifest
        from vtaps.runtime.program import LockError

        try:
            self.vtaps_session.load(Manifest.read(Path(manifest)))  # type: ignore[attr-defined]
        except (LockError, BlockFault) as error:
            return str(error)
        return ""

    def vtaps_patch(self, name: str, first: int, payload: bytes) -> str:
        """Fill slots of the memory of an edit that sets rows; returns why not, or nothing."""
        from vtaps.runtime.program import LockError

        try:
            self.vtaps_session.patch(name, first, payload)  # type: ignore[attr-defined]
        except LockError as error:
            return str(error)
        return ""

    def vtaps_define(self, name: str, payload: bytes) -> str:
        """Give a vector its numbers; returns why not, or nothing."""
        from vtaps.runtime.program import LockError

        try:
            self.vtaps_session.define(name, payload)  # type: ignore[attr-defined]
        except LockError as error:
            return str(error)
        return ""

    def vtaps_collect(self, wanted: Sequence[tuple[str, int, int]], asker: int, held: int) -> Any:
        """Records of ``(key, child, generated tokens)``; the worker forgets them.

        A worker in the process ``asker`` gives them as they are, others in the form of
        :mod:`vtaps.runtime.transport`.  ``held``: see :class:`~vtaps.runtime.spool.Spool`.
        """
        from vtaps.runtime.transport import pack

        session = self.vtaps_session  # type: ignore[attr-defined]
        session.spool.held = held
        keys = [(k, c, n) for k, c, n in wanted]
        return session.collect(keys) if asker == os.getpid() else pack(session.hand_over(keys))

    def vtaps_verify(self) -> None:
        """Raises where a location was not launched in each step that needed it."""
        self.vtaps_session.verify()  # type: ignore[attr-defined]

    def vtaps_close(self) -> None:
        """End what the block holds beside the model: a thread, and its tables' place in this process."""
        if (session := getattr(self, "vtaps_session", None)) is not None:
            session.close()

    def vtaps_forget(self, keys: Sequence[str]) -> None:
        """Drop what is held of these requests and their children; unknown keys are no error."""
        self.vtaps_session.table.forget(set(keys))  # type: ignore[attr-defined]

"""The names of a function that something else than an assignment of its own to them binds."""

from __future__ import annotations

import libcst as cst


def loose_names(function: cst.FunctionDef) -> frozenset[str]:
    """Names that may stand for another value than the last one that an op of the function bound to them: targets of
    loops and of ``with``, starred and nested ones, those of imports, patterns and handlers, of ``del`` and of what
    nested functions rebind, and those of which a part is assigned."""
    finder = _Finder()
    function.body.visit(finder)
    return frozenset(finder.names)


class _Finder(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._comprehensions = 0

    def _all(self, node: cst.CSTNode) -> None:
        """Every name in a target, the roots of parts among them."""
        if isinstance(node, cst.Name):
            self.names.add(node.value)
        elif isinstance(node, (cst.Attribute, cst.Subscript)):
            self._all(node.value)
        else:
            for child in node.children:
                self._all(child)

    def _target(self, target: cst.BaseExpression) -> None:
        """An assignment's: its plain names, and those of a flat tuple, have ops."""
        if isinstance(target, cst.Name):
            return
        if isinstance(target, (cst.Tuple, cst.List)) and not any(
            isinstance(element, cst.StarredElement) for element in target.elements
        ):
            for element in target.elements:
                if not isinstance(element.value, cst.Name):
                    self._all(element.value)
            return
        self._all(target)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        self._target(node.target)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        self._target(node.target)

    def visit_AugAssign(self, node: cst.AugAssign) -> None:
        self._target(node.target)

    def visit_For(self, node: cst.For) -> None:
        self._all(node.target)

    def visit_AsName(self, node: cst.AsName) -> None:
        self._all(node.name)

    def visit_ImportAlias(self, node: cst.ImportAlias) -> None:
        self._all(node.name)

    def visit_Del(self, node: cst.Del) -> None:
        self._all(node.target)

    def visit_Global(self, node: cst.Global) -> None:
        self.names.update(item.name.value for item in node.names)

    def visit_Nonlocal(self, node: cst.Nonlocal) -> None:
        self.names.update(item.name.value for item in node.names)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.names.add(node.name.value)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.names.add(node.name.value)

    def visit_MatchAs(self, node: cst.MatchAs) -> None:
        if node.name is not None:
            self._all(node.name)

    def visit_MatchStar(self, node: cst.MatchStar) -> None:
        if node.name is not None:
            self._all(node.name)

    def visit_MatchMapping(self, node: cst.MatchMapping) -> None:
        if node.rest is not None:
            self._all(node.rest)

    def visit_NamedExpr(self, node: cst.NamedExpr) -> None:
        if self._comprehensions:
            self._all(node.target)

    def visit_CompFor(self, node: cst.CompFor) -> None:
        self._comprehensions += 1

    def leave_CompFor(self, original_node: cst.CompFor) -> None:
        self._comprehensions -= 1

    def visit_ListComp(self, node: cst.ListComp) -> None:
        self._comprehensions += 1

    def leave_ListComp(self, original_node: cst.ListComp) -> None:
        self._comprehensions -= 1

    def visit_SetComp(self, node: cst.SetComp) -> None:
        self._comprehensions += 1

    def leave_SetComp(self, original_node: cst.SetComp) -> None:
        self._comprehensions -= 1

    def visit_DictComp(self, node: cst.DictComp) -> None:
        self._comprehensions += 1

    def leave_DictComp(self, original_node: cst.DictComp) -> None:
        self._comprehensions -= 1

    def visit_GeneratorExp(self, node: cst.GeneratorExp) -> None:
        self._comprehensions += 1

    def leave_GeneratorExp(self, original_node: cst.GeneratorExp) -> None:
        self._comprehensions -= 1

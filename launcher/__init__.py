"""Installed as ``unicron_elastic.launcher``; the folder stands at the top of the repository for its readers."""

if __name__ != "unicron_elastic.launcher":
    raise ImportError(
        f"import unicron_elastic.launcher, not {__name__}: a second copy of the package would hold a second copy "
        "of every class"
    )

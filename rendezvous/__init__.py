"""Installed as ``unicron_elastic.rendezvous``; the folder stands at the top of the repository for its readers."""

if __name__ != "unicron_elastic.rendezvous":
    raise ImportError(
        f"import unicron_elastic.rendezvous, not {__name__}: a second copy of the package would hold a second copy "
        "of every class"
    )

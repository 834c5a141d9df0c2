"""Colours of the page, light and dark; neighbours differ in lightness, too, for eyes that tell few hues apart."""

RUNS = {
    "light": ("#1768c4", "#c8500a", "#13795b", "#8a44a8", "#946c00", "#0b7285"),
    "dark": ("#62abff", "#ffa061", "#4fd0a3", "#d6a2ec", "#e8bd4f", "#5fd3e0"),
}
TIERS = {
    "light": ("#0f766e", "#5b8def", "#d97706", "#7c5cd6", "#be4b83"),
    "dark": ("#2fb3a3", "#8db4ff", "#f0a13c", "#a893f5", "#ec86b5"),
}
STATES = {
    "light": ("#c2483d", "#7c5cd6", "#d99a1c", "#2f7fc1"),
    "dark": ("#f0817a", "#a893f5", "#f2c450", "#6cb6f5"),
}
SURFACES = {
    "light": {"text": "#1c2430", "muted": "#5a6675", "grid": "#e3e7ed", "card": "#ffffff", "mark": "#8b96a5"},
    "dark": {"text": "#e4e9ef", "muted": "#98a5b5", "grid": "#2d3845", "card": "#182029", "mark": "#6c7a8b"},
}


def colours(theme: str) -> dict[str, str]:
    """What each name of a colour is in this theme."""
    numbered = {"run": RUNS[theme], "tier": TIERS[theme], "state": STATES[theme]}
    return {f"{kind}{at}": value for kind, of in numbered.items() for at, value in enumerate(of)} | SURFACES[theme]

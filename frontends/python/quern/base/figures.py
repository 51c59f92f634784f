"""Figures in text, as the program prints them."""


def three_digits(value: float) -> str:
    """"950", "3.41k", "24.5k", "260k", "1.02M". A whole number below 1000 is exact."""
    if abs(value) < 1000 and float(value).is_integer():
        return f"{value:.0f}"
    units = ["", "k", "M", "B", "T"]
    while len(units) > 1 and abs(value) >= 999.5:
        value /= 1000
        units.pop(0)
    decimals = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{decimals}f}{units[0]}"

"""The ten colours of tinytopics, and as many more as there are topics."""

from __future__ import annotations

from typing import Literal, overload

import numpy as np
from matplotlib.colors import ListedColormap, to_rgb
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline

Colours = NDArray[np.float64]
OBSERVABLE_10 = (
    "#4269D0", "#EFB118", "#3CA951", "#FF725C", "#A463F2", "#9C6B4E", "#FF8AB7", "#9498A0", "#6CC5B0", "#97BBF5",
)  # fmt: skip
"""The palette of Observable Plot, each hue where matplotlib's tab10 has it."""

TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)
D65 = np.array([0.95047, 1.0, 1.08883])
"""The white point of sRGB."""
CUBE_ABOVE = 6 / 29
"""CIELAB is the cube root of a share of white above the cube of this, and a straight line below it."""


@overload
def pal_tinytopics(format: Literal["hex"] = "hex") -> list[str]: ...
@overload
def pal_tinytopics(format: Literal["rgb", "lab"]) -> Colours: ...
def pal_tinytopics(format: Literal["hex", "rgb", "lab"] = "hex") -> list[str] | Colours:
    """Ten colours: as texts, or as an array (10, 3) of sRGB from 0 to 1 or of CIELAB."""
    if format not in ("hex", "rgb", "lab"):
        raise ValueError(f"Format must be 'hex', 'rgb', or 'lab', not {format!r}.")
    if format == "hex":
        return list(OBSERVABLE_10)
    rgb = np.array([to_rgb(colour) for colour in OBSERVABLE_10])
    return rgb if format == "rgb" else convert_rgb_to_lab(rgb)


def scale_color_tinytopics(n: int) -> ListedColormap:
    """n colours: the first of the ten or, beyond them, n places on a smooth curve through all ten, in CIELAB."""
    rgb = pal_tinytopics("rgb")
    if n > len(rgb):
        curve = CubicSpline(np.linspace(0, 1, len(rgb)), convert_rgb_to_lab(rgb))
        rgb = convert_lab_to_rgb(curve(np.linspace(0, 1, n)))
    return ListedColormap(rgb[:n])


def convert_rgb_to_lab(rgb: Colours) -> Colours:
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    share = linear @ TO_XYZ.T / D65
    root = np.where(share > CUBE_ABOVE**3, np.cbrt(share), share / (3 * CUBE_ABOVE**2) + 4 / 29)
    x, y, z = root.T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)


def convert_lab_to_rgb(lab: Colours) -> Colours:
    """Colours that a screen does not have become the nearest that it has, channel by channel."""
    y = (lab[:, 0] + 16) / 116
    root = np.stack([y + lab[:, 1] / 500, y, y - lab[:, 2] / 200], axis=1)
    share = np.where(root > CUBE_ABOVE, root**3, 3 * CUBE_ABOVE**2 * (root - 4 / 29))
    linear = np.clip((share * D65) @ np.linalg.inv(TO_XYZ).T, 0, 1)
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)

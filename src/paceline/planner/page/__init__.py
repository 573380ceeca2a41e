"""A plan as one page that opens offline: sliders over settings that were all planned beforehand."""

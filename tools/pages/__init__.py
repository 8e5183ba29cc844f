"""What only stands on pages of this repository, for `render_readme.py`: tables, claims, pictures."""

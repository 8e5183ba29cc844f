"""What a user may ask for: shapes and types, what fits what, and how a mistake is explained. Imports no torch."""

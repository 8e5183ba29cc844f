"""What every report is made of: tables, charts, a page, and the statistics in them."""

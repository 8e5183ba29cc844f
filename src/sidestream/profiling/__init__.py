"""When a unit computes and when its rows travel: four times, their spans, and what a schedule could hide at best."""

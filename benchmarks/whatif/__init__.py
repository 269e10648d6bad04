"""How far predictions for devices and settings that are not here are from what was measured there."""

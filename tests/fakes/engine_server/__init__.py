"""Engine servers of ours that follow the published protocols of the real ones, and are as unfriendly as they are."""

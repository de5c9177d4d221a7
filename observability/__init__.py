"""What people watch a fleet with: dashboards as code. The metrics themselves are counted where things happen."""

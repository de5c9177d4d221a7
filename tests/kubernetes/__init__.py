"""The Helm chart, rendered by Helm's own library and held against Kubernetes' own schemas."""

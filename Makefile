PYTHON ?= .venv/bin/python
export PYTHON

.PHONY: check lint types test kernel lowest format docs boards proof site plots soak fuzz long attack clients nixl schemathesis ui vllm vllm-hybrid kubernetes image nats hosts slurm trtllm-upstream comparison

check: lint types test  ## everything CI runs, in the environment that is there

lint:
	.ci/run lint

types:
	.ci/run types

test:
	$(PYTHON) -m pytest -n 4 --dist loadfile

kernel:  ## the kernel's own tests, which import nothing else of poolgrid
	$(PYTHON) -m pytest -n 2 $$($(PYTHON) -m tests.kernel)

lowest:  ## the lowest versions of all dependencies that pyproject.toml allows, in build/lowest, and every served path with them
	rm -rf build/lowest
	$(PYTHON) -m venv build/lowest
	build/lowest/bin/pip install -q uv
	build/lowest/bin/uv pip install -q --python build/lowest --resolution lowest-direct . 'pytest>=8.3' 'psutil>=6.1' 'hypothesis>=6.115' 'trustme>=1.2'
	build/lowest/bin/python -m pytest -p no:cacheprovider tests/e2e/test_served_surface.py

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

docs:  ## write what is generated
	$(PYTHON) -m lab.website.configuration_page
	$(PYTHON) -m lab.website.request_life_page > docs/internals/request_life.md
	$(PYTHON) -m lab.website.support_page
	$(PYTHON) -m lab.attacks.page
	$(PYTHON) -m lab.website.metrics_tables
	$(PYTHON) -m lab.website.parser_tables
	$(PYTHON) -m lab.website.figures

boards:  ## write Grafana's dashboards in deploy/grafana from their code
	$(PYTHON) -m lab.dashboards

proof:  ## a live fleet, Prometheus and Alertmanager: every panel shows something, every alert fires in its drill
	$(PYTHON) -m tests.observability_proof

site:  ## the pages as HTML in build/site, a folder per version, with search, the OpenAPI page and llms.txt; needs the extra `docs`
	$(PYTHON) -m lab.website.build

plots:  ## the plots in docs/plots, drawn anew; needs the extra `docs`
	$(PYTHON) -m lab.website.plots

SEEDS ?= 0..4999
JOBS ?= 2
EXAMPLES_FACTOR ?= 50
INDEX_FACTOR ?= 250
PROPERTY_FACTOR ?= 20

soak:  ## thousands of seeds of the fault simulation, each under every profile, of programs for the index, of texts for tokenizers
	POOLGRID_EXAMPLES_FACTOR=$(INDEX_FACTOR) $(PYTHON) -m pytest -n 0 tests/router/test_prefix_index.py
	POOLGRID_EXAMPLES_FACTOR=$(EXAMPLES_FACTOR) $(PYTHON) -m pytest tests/frontend/test_prompt_encoder.py
	$(PYTHON) -m tests.fault_simulation --seeds $(SEEDS) --all-profiles --jobs $(JOBS) --keep

fuzz:  ## impossible values of engines at every place of their answers, EXAMPLES_FACTOR times as many as in CI, and every property on PROPERTY_FACTOR times the examples
	POOLGRID_EXAMPLES_FACTOR=$(EXAMPLES_FACTOR) $(PYTHON) -m pytest -n 0 tests/workers/server/test_value_fuzz.py
	POOLGRID_EXAMPLES_FACTOR=$(PROPERTY_FACTOR) $(PYTHON) -m pytest -n 2 -m hypothesis

long:  ## what CI does in short: the whole recorded trace on two pools, 10,000 mutated bodies at a global router, agents with five seeds, mixed traffic at three pressures
	POOLGRID_TRACE_REQUESTS=1000 POOLGRID_FUZZ_BODIES=10000 $(PYTHON) -m pytest -n 2 --dist loadfile tests/e2e/test_failures.py tests/e2e/test_body_fuzz.py
	POOLGRID_AGENT_SEEDS=5 $(PYTHON) -m pytest -n 0 tests/simulation/test_agents.py tests/simulation/test_mixed_traffic.py

PARTS ?=

attack:  ## every attack of lab/attacks/README.md on a fresh pool, or those of PARTS="guides slow-disk"
	$(PYTHON) -m lab.attacks $(PARTS)

SUITES ?=

nixl:  ## tensors between workers by the real NIXL over loopback, whose wheels (300 MB) go into build/nixl
	$(PYTHON) -m tests.nixl

clients:  ## unmodified client frameworks against a fresh pool, or those of SUITES="openai_agents"
	$(PYTHON) -m tests.clients $(SUITES)

TRTLLM ?=

trtllm-upstream:  ## our facts of TensorRT-LLM against its own Python files in the folder TRTLLM: see CONTRIBUTING.md
	$(PYTHON) -m tests.trtllm_upstream $(TRTLLM)

CASES ?= 200

schemathesis:  ## the HTTP API against its own description, CASES for each of some 26 operations: 5,000 in all
	POOLGRID_SCHEMATHESIS_CASES=$(CASES) $(PYTHON) -m pytest -n 2 tests/frontend/test_openapi.py

ui:  ## the fleet page in Chromium: keyboard, phone, a large pool with frame times, pictures for docs/images
	$(PYTHON) -m tests.ui --pictures

CHECKS ?=

vllm:  ## in front of two real vLLM servers on the CPU, in the environment that POOLGRID_VLLM names, or CHECKS="index kill"
	$(PYTHON) -m tests.real_vllm $(CHECKS)

vllm-hybrid:  ## what routers promise of hybrid and drafting models, against vLLM's own cache managers (POOLGRID_VLLM), or those of POOLGRID_VLLM_SOURCE: 69,000 requests, two minutes, no model
	$(PYTHON) -m tests.real_vllm.promises

PEER_PYTHON ?=

comparison:  ## routers in turn before the same stand-in engines; PEER_PYTHON has smg and vllm-router; a machine with GPUs: docs/benchmarks.md
	$(PYTHON) -m lab.comparison --rehearse --seconds 20 --levels light,heavy,eviction --disturb heavy --peer-python "$(PEER_PYTHON)" --output build/comparison

WRITE ?=

kubernetes:  ## the Helm chart against the schemas of three versions of Kubernetes; WRITE=--write writes deploy/kubernetes/manifests
	$(PYTHON) -m tests.kubernetes $(WRITE)

image:  ## both container images built by buildah, without a daemon, and used; needs root, buildah, debootstrap
	$(PYTHON) -m tests.image

nats:  ## a pool on three NATS servers on loopback: servers, consolidators and workers killed under load; what appends cost
	$(PYTHON) -m tests.nats

release:  ## sdist, wheel, SBOM, notes and checksums in build/release; needs the extra `release`
	$(PYTHON) -m pip install -q -e '.[release]'
	$(PYTHON) -m lab.release build

SEED ?= 0

hosts:  ## two pools and NATS on three network namespaces: each is cut off for 20 s, every process killed; SEED for the order
	$(PYTHON) -m tests.hosts --seed $(SEED)

slurm:  ## the job scripts on a real Slurm, this machine as three nodes; needs Debian's slurm-wlm and munge
	$(PYTHON) -m tests.slurm

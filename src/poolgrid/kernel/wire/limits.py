"""Every bound of the contract, each with its reason.

A receiver checks these before it does work in proportion to the input; a sender checks them before it sends.
"""

from __future__ import annotations

FRAME_BYTES_MAX = 64 * 1024 * 1024
"""Largest single message between processes. A 1 M-token prompt is 4 MiB; a snapshot is cut into parts below this."""

SELECT_FRAME_BYTES_MAX = 40 * 1024 * 1024
"""Largest question on the select plane: ``RENEWALS_MAX`` reservations whose ids are all as long as allowed are 34 MiB,
the hashes of the longest prompt 8 MiB."""

QUESTION_FRAME_BYTES_MAX = 4096
"""Largest question about the journal or a tensor: an identifier and a few numbers, and the handshake before it."""

SUBSCRIPTION_FRAME_BYTES_MAX = 1024
"""Largest message towards a feed: a subscription to its topic, and the handshake before it."""

IDENTIFIER_BYTES_MAX = 256
"""Worker ids, request ids, model names, endpoints: long enough for ``namespace.component.endpoint`` and a URL."""

PROMPT_TOKENS_MAX = 4 * 1024 * 1024
"""Longest prompt on the request plane; four times the longest context any served model offers today."""

BLOCKS_PER_EVENT_MAX = 1024 * 1024
"""Sequence hashes in one event (8 MiB). A sender splits longer chains, each part naming its parent."""

EVENTS_PER_BATCH_MAX = 65_536
"""Events in one batch: one engine step of the largest batch sizes in use stays two orders below."""

TOKENS_TOGETHER_MAX = 4096
"""Tokens of one request that a worker may be configured to send together; a kept token takes 4 bytes."""

TOKEN_DELTAS_PER_BATCH_MAX = 65_536
"""Requests that one engine step can report to one peer."""

STOP_TOKENS_MAX = 1024
"""Stop token ids of one request."""

LORAS_PER_WORKER_MAX = 4096
"""Adapters that one worker card may list."""

TRACEPARENT_CHARS_MAX = 55
"""The span that a message was sent from, as version 00 of W3C's Trace Context writes it."""

TRACE_STATE_CHARS_MAX = 512
"""State that tracing systems pass on: the size that W3C requires of all of them."""

RETAINED_RANGES_MAX = 64
"""Ranges of one prompt whose blocks are to stay longer or shorter than others: a system prompt, tools, documents."""

OPAQUE_BYTES_MAX = 16 * 1024 * 1024
"""Disaggregation parameters, opaque to all but the two engines."""

MULTIMODAL_BYTES_MAX = 56 * 1024 * 1024
"""All media of one request, encoded (``Generate.multimodal``): one file of 50 MiB and its prompt text, with room in the
frame for a prompt of 1 M tokens and its sampling. A sender checks the frame as a whole."""

MEDIA_ITEMS_MAX = 256
"""Media in one request, a conversation's earlier ones included; engines give up long before."""

EMBEDDING_INPUTS_MAX = 2048
"""Texts of one request for embeddings; OpenAI's own limit."""

IMAGES_PER_TASK_MAX = 10
"""Images of one request for images; OpenAI's own limit."""

RESULT_BYTES_MAX = MULTIMODAL_BYTES_MAX
"""What a task is answered with, in one message: a video of 56 MiB is a minute of 480p, or ten seconds of 1080p at a
high rate. 2,048 embeddings of 4,096 numbers take 32 MiB."""

PROMPT_CHARS_MAX = 16 * 1024 * 1024
"""Rendered prompt text next to the token ids of a multimodal request; about four characters a token."""

MEDIA_KINDS_MAX = 16
"""Kinds of media that a card lists."""

IMAGE_RESOLUTIONS_MAX = 256
"""Resolutions of tiled images on a card; models have 5 to 36."""

STEP_TIMES_MAX = 64
"""Measured points of an engine's step times in a card; a dozen draw the curve."""

SERVING_ENDPOINTS_MAX = 1024
"""Addresses of an engine's own HTTP server in a card: as many as a worker may have data-parallel ranks."""

CHAT_TEMPLATE_CHARS_MAX = 65_536
"""A chat template in a card; published ones have up to some 20,000 characters."""

POOL_TEMPLATES_CHARS_MAX = 8 * 1024 * 1024
"""Chat templates in the cards of a pool together: they travel in one message, the first part of a snapshot."""

TENSOR_BYTES_MAX = 1024 * 1024 * 1024
"""One tensor between workers: the embeddings of a very large image are some tens of megabytes."""

TENSOR_CHUNK_BYTES_MAX = 4 * 1024 * 1024
"""A piece of a tensor in one message: large enough that messages cost nothing next to bytes, small enough that others'
messages get their turn."""

TENSOR_DIMENSIONS_MAX = 8
"""Dimensions of a tensor between workers."""

TENSORS_PER_REQUEST_MAX = 1024
"""Tensors of one request: some per medium."""

NIXL_METADATA_BYTES_MAX = 65_536
"""Description of one NIXL agent for another; about a kilobyte with UCX."""

REPLAY_RECORDS_MAX = 4096
"""Journal records in one answer to a replay request; the asker comes back for the rest."""

FEED_RECORDS_PER_MESSAGE_MAX = 64
"""Journal records in one message of the live feed: they are lost and replayed together, and a message of more is hardly
cheaper."""

SOURCES_PER_WORKER_MAX = 64
"""Event sources of one worker rank that a snapshot may list; far more than a pool has."""

SNAPSHOT_CHAINS_PER_PART_MAX = 4096
"""Block chains in one part of a snapshot: a part stays below ``FRAME_BYTES_MAX`` with 2,048-block chains."""

U32_MAX = 2**32 - 1
"""Token ids, counts and sizes are unsigned 32-bit."""

TEXT_CHARS_MAX = 4096
"""Reasons and error messages."""

LOGPROBS_MAX = 64
"""Alternatives per token; OpenAI's own limit is 20."""

GUIDE_BYTES_MAX = 1024 * 1024
"""A guide for guided decoding: a JSON schema, a regular expression, a grammar, a structural tag."""

GUIDE_CHOICES_MAX = 1024
"""Texts that a guided choice may offer."""

BAD_TOKENS_MAX = 1024
"""Token ids that one request may forbid."""

LOGITS_PROCESSORS_MAX = 8
"""Logits processors of one request; each costs a pass over a row of logits per token."""

LOGITS_ARGUMENT_BYTES_MAX = 1024 * 1024
"""Arguments of one logits processor, as JSON: a list of half a large vocabulary fits."""

WORKERS_EXCLUDED_MAX = 1024
"""Workers that one ``Select`` may exclude: every worker that failed a request, of a large pool."""

REFUSAL_REASONS_MAX = 256
"""Workers that one refusal explains; more of them are not read."""

RENEWALS_MAX = 65_536
"""Reservations in one ``Renew``; the sender splits."""

ENGINE_FIELDS_MAX = 64
"""Fields of a request that only its engine reads; engines have some forty in all."""

DRAIN_TIMEOUT_MS_MAX = 86_400_000
"""Longest drain time of a worker: a day, in which the longest answer ends."""

GROUPS_PER_WORKER_MAX = 15
"""KV groups of a worker besides full attention that differ in what they need; models have one to three."""

WINDOW_BLOCKS_MAX = PROMPT_TOKENS_MAX
"""Blocks before a boundary that a KV group needs, and blocks of the index in one of a group: no prompt has more."""

POOL_MODELS_MAX = 1024
"""Models that one pool may report."""

SESSION_FOOTPRINTS_MAX = 8
"""Worker ranks on which a session's blocks are remembered, the latest."""

SESSIONS_DISPLACED_MAX = 64
"""Sessions that one turn may take the places of; further ones keep them on other routers until their leases end."""

SESSION_TAILS_MAX = 4
"""Turns of a session from which forks are recognised, the latest."""

SESSION_ECHOES_MAX = 8
"""Places of an answer by which a prompt that repeats it is recognised."""

ANSWERS_TOGETHER_MAX = 256
"""Answers of turns that one message tells a worker."""

FORWARDS_TOGETHER_MAX = 1024
"""Forwarded requests of each kind that one message reports."""

U64_MAX = 2**64 - 1
"""Hashes, epochs, sequence numbers and offsets are unsigned 64-bit."""

assert BLOCKS_PER_EVENT_MAX * 8 < FRAME_BYTES_MAX
assert PROMPT_TOKENS_MAX * 4 < FRAME_BYTES_MAX
assert OPAQUE_BYTES_MAX < FRAME_BYTES_MAX
assert MULTIMODAL_BYTES_MAX < FRAME_BYTES_MAX
assert TENSOR_CHUNK_BYTES_MAX < FRAME_BYTES_MAX
assert POOL_TEMPLATES_CHARS_MAX * 4 < FRAME_BYTES_MAX

"""The routes that engine servers have, read in their sources: vLLM 0.33.0, SGLang 0.5.23, TensorRT-LLM 1.4."""

CLIENTS = (
    # vLLM
    "/classify", "/cohere/v2/chat", "/cohere/v2/chat/render", "/detokenize", "/generative_scoring",
    "/inference/v1/generate", "/invocations", "/pooling", "/rerank", "/score", "/tokenize", "/tokenizer_info",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/chat/completions", "/v1/chat/completions/batch",
    "/v1/chat/completions/derender", "/v1/chat/completions/render", "/v1/completions", "/v1/completions/derender",
    "/v1/completions/render", "/v1/decisions", "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/messages/render", "/v1/models", "/v1/realtime", "/v1/rerank", "/v1/responses", "/v1/responses/render",
    "/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/v1/score", "/v1/systemone", "/v2/embed", "/v2/rerank",
    # SGLang
    "/v1/classify", "/v1/detokenize", "/v1/models/org/name", "/v1/tokenize",
    # TensorRT-LLM
    "/v1/images/edits", "/v1/images/generations", "/v1/videos", "/v1/videos/generations", "/v1/videos/video_1",
    "/v1/videos/video_1/content",
)  # fmt: skip

OPERATORS = (
    # vLLM
    "/", "/abort_requests", "/collective_rpc", "/docs", "/fault_tolerance/apply", "/fault_tolerance/status",
    "/finish_weight_update", "/get_world_size", "/health", "/inference/v1/abort_requests",
    "/init_weight_transfer_engine", "/is_paused", "/is_scaling_elastic_ep", "/is_sleeping", "/kv_event_sources",
    "/load", "/metrics", "/openapi.json", "/pause", "/ping", "/ready", "/readyz", "/release_kv_cache_memory",
    "/reset_encoder_cache", "/reset_mm_cache", "/reset_prefix_cache", "/resume", "/scale_elastic_ep", "/server_info",
    "/shutdown_weight_transfer_engine", "/sleep", "/start_draft_weight_update", "/start_profile",
    "/start_weight_update", "/static", "/stop_profile", "/update_weight_version", "/update_weights",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/version", "/wake_up", "/weight_checker", "/weight_info",
    # SGLang
    "/abort_request", "/add_external_corpus", "/api/chat", "/api/generate", "/api/show", "/api/tags",
    "/begin_weight_update", "/close_session", "/configure_logging", "/continue_generation",
    "/destroy_weights_update_group", "/dump_expert_distribution_record", "/dumper/reset", "/encode",
    "/end_weight_update", "/flush_cache", "/freeze_gc", "/generate", "/get_hicache_l3_cache_layout",
    "/get_model_info", "/get_remote_instance_transfer_engine_info", "/get_server_info", "/get_weights_by_name",
    "/health_generate", "/hicache/storage-backend", "/hicache/storage-backend/clear",
    "/init_weights_send_group_for_remote_instance", "/init_weights_update_group", "/list_external_corpora",
    "/load_lora_adapter", "/load_lora_adapter_from_tensors", "/model_info", "/open_session", "/parse_function_call",
    "/pause_generation", "/pd_role_switch", "/register_transfer_engine_info", "/release_memory_occupation",
    "/remote_instance_transfer_engine_info", "/remove_external_corpus", "/resume_memory_occupation",
    "/send_weights_to_remote_instance", "/separate_reasoning", "/set_internal_state", "/set_trace_level",
    "/slow_down", "/start_expert_distribution_record", "/stop_expert_distribution_record", "/unload_lora_adapter",
    "/update_weights_from_disk", "/update_weights_from_distributed", "/update_weights_from_ipc",
    "/update_weights_from_tensor", "/v1/loads", "/vertex_generate", "/weights_checker",
    # TensorRT-LLM
    "/kv_cache_events", "/perf_metrics", "/prometheus/metrics", "/release_memory", "/resume_memory",
    "/steady_clock_offset", "/v1/kv_cache_hints",
)  # fmt: skip

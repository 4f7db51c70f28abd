-- The tables of 1.0.0, schema 0005, as PostgreSQL has them.

CREATE TABLE hearth_schema (
    version_num VARCHAR(32) NOT NULL,
    PRIMARY KEY (version_num)
);

CREATE TABLE api_key (
    public_id VARCHAR(12) NOT NULL,
    secret_sha256 BYTEA NOT NULL,
    name VARCHAR(64) NOT NULL,
    tier VARCHAR(64) NOT NULL,
    scopes JSON NOT NULL,
    models JSON,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE,
    revoked_at TIMESTAMP WITH TIME ZONE,
    last_used_at TIMESTAMP WITH TIME ZONE,
    notes VARCHAR(1000) DEFAULT '' NOT NULL,
    replaced_by VARCHAR(12),
    requests_per_minute INTEGER,
    tokens_per_minute INTEGER,
    parallel_requests INTEGER,
    batch_items INTEGER,
    images_per_day INTEGER,
    PRIMARY KEY (public_id)
);

CREATE TABLE bucket (
    name VARCHAR NOT NULL,
    tat BIGINT NOT NULL,
    PRIMARY KEY (name)
);

CREATE TABLE quota_day (
    owner VARCHAR(64) NOT NULL,
    kind VARCHAR(32) NOT NULL,
    day DATE NOT NULL,
    used BIGINT NOT NULL,
    PRIMARY KEY (owner, kind, day)
);

CREATE TABLE usage_hour (
    key_id VARCHAR(12) NOT NULL,
    model VARCHAR NOT NULL,
    hour INTEGER NOT NULL,
    kind VARCHAR(32) NOT NULL,
    requests BIGINT NOT NULL,
    prompt_tokens BIGINT NOT NULL,
    completion_tokens BIGINT NOT NULL,
    cached_tokens BIGINT NOT NULL,
    images BIGINT NOT NULL,
    errors BIGINT NOT NULL,
    aborted BIGINT NOT NULL,
    audio_seconds DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (key_id, model, hour, kind)
);

CREATE INDEX usage_hour_by_hour ON usage_hour (hour);

CREATE TABLE audit (
    id BIGSERIAL NOT NULL,
    at TIMESTAMP WITH TIME ZONE NOT NULL,
    actor VARCHAR NOT NULL,
    origin VARCHAR NOT NULL,
    action VARCHAR(64) NOT NULL,
    object VARCHAR NOT NULL,
    detail JSON NOT NULL,
    PRIMARY KEY (id)
);

CREATE INDEX audit_by_at ON audit (at);

CREATE TABLE console_session (
    id_sha256 BYTEA NOT NULL,
    token_sha256 BYTEA NOT NULL,
    key_id VARCHAR(12) NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL,
    last_seen TIMESTAMP WITH TIME ZONE NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    PRIMARY KEY (id_sha256)
);

CREATE INDEX console_session_by_key ON console_session (key_id);

CREATE TABLE file (
    id VARCHAR(64) NOT NULL,
    key_id VARCHAR(12) NOT NULL,
    place VARCHAR(64) NOT NULL,
    purpose VARCHAR(32) NOT NULL,
    filename VARCHAR(255) NOT NULL,
    bytes BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,
    PRIMARY KEY (id)
);

CREATE INDEX file_by_key ON file (key_id, id);

CREATE TABLE batch (
    id VARCHAR(64) NOT NULL,
    key_id VARCHAR(12) NOT NULL,
    place VARCHAR(64) NOT NULL,
    input_file_id VARCHAR(64) NOT NULL,
    endpoint VARCHAR(64) NOT NULL,
    completion_window VARCHAR(8) NOT NULL,
    labels JSON,
    output_seconds BIGINT,
    status VARCHAR(16) NOT NULL,
    created_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,
    in_progress_at BIGINT,
    finalizing_at BIGINT,
    completed_at BIGINT,
    failed_at BIGINT,
    expired_at BIGINT,
    cancelling_at BIGINT,
    cancelled_at BIGINT,
    total INTEGER DEFAULT '0' NOT NULL,
    completed INTEGER DEFAULT '0' NOT NULL,
    failed INTEGER DEFAULT '0' NOT NULL,
    model VARCHAR,
    usage JSON,
    errors JSON,
    output_file_id VARCHAR(64),
    error_file_id VARCHAR(64),
    runner VARCHAR(32),
    leased_until DOUBLE PRECISION DEFAULT '0' NOT NULL,
    PRIMARY KEY (id)
);

CREATE INDEX batch_by_key ON batch (key_id, id);

CREATE INDEX batch_by_status ON batch (status);

CREATE TABLE replica (
    id VARCHAR(64) NOT NULL,
    renewed_at DOUBLE PRECISION NOT NULL,
    running JSON NOT NULL,
    PRIMARY KEY (id)
);

CREATE TABLE secret (
    name VARCHAR(32) NOT NULL,
    value BYTEA NOT NULL,
    PRIMARY KEY (name)
);

INSERT INTO hearth_schema VALUES ('0005');

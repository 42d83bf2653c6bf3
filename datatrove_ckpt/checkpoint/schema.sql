-- Answers of documents that are not finished. A row is dropped when its document's chunk is committed.
-- ordinal tells documents with one id apart; occurrence is the n-th equal payload of one rollout: another sample.
-- Exactly one of result (JSON) and error_message (a permanent error) is set.
-- checksum covers all other columns; it is NULL in rows of release 0.1.
CREATE TABLE IF NOT EXISTS request_cache (
    chunk_index   INTEGER NOT NULL,
    doc_id        TEXT    NOT NULL,
    rollout_idx   INTEGER NOT NULL,
    payload_hash  TEXT    NOT NULL,
    result        BLOB,
    error_message TEXT,
    ordinal       INTEGER NOT NULL,
    occurrence    INTEGER NOT NULL,
    checksum      INTEGER,
    PRIMARY KEY (ordinal, rollout_idx, payload_hash, occurrence)
);
CREATE INDEX IF NOT EXISTS request_cache_chunk ON request_cache (chunk_index);

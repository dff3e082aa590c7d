package envoy

import (
	"crypto/sha256"
	"encoding/hex"

	common "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	"github.com/go-json-experiment/json/jsontext"
)

// maxKey is what the key of a bucket may have, in bytes.
const maxKey = 512

// bucketKey is the JSON array of the entries' [key, value] pairs, each with the value that its bucket has. Of one that is too
// long for the database it is the hash: an error would let a request pass where Envoy is told to let errors pass, and its
// sender chooses how long a header is.
func bucketKey(entries []*common.RateLimitDescriptor_Entry, values []string) string {
	key := []byte{'['}
	for i, entry := range entries {
		if i > 0 {
			key = append(key, ',')
		}
		key = append(key, '[')
		key = appendText(key, entry.GetKey())
		key = append(key, ',')
		key = appendText(key, values[i])
		key = append(key, ']')
	}
	if key = append(key, ']'); len(key) <= maxKey {
		return string(key)
	}
	sum := sha256.Sum256(key)
	return "sha256:" + hex.EncodeToString(sum[:]) // no array begins so
}

// appendText appends a JSON string. Both protocols let nothing through but UTF-8.
func appendText(to []byte, text string) []byte {
	to, _ = jsontext.AppendQuote(to, text)
	return to
}

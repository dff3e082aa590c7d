// Package vectors has what the clients of all languages must answer alike: the files beside it. The clients' own tests
// read addresses.json, the key of a peer and lines of X-Forwarded-For behind so many proxies.
package vectors

import (
	_ "embed"
	"encoding/json"
)

// A Bucket has calls and the decisions that they must get. It starts full, less the tokens taken at the start. Times are in ms.
type Bucket struct {
	Name             string
	Capacity, Refill int64
	Every            int64
	Stepped          bool
	Taken            int64
	Steps            []Step
}

// A Step is a call at a time after the start. Of the decision, it has the fields that the case speaks of.
type Step struct {
	At         int64
	Call       string // acquire, peek, refund, charge, or reset, and then peek
	Tokens     int64
	Allowed    bool
	Remaining  *int64
	RetryAfter json.RawMessage `json:"retry_after"` // null: never
	ResetAfter *int64          `json:"reset_after"`
}

// An Error has a call that fails. Policy api has a capacity of 10 and refills 1 an hour; before the call, the idempotency key once
// was used for a cost of 2 on the key user:42, and the key over was settled there.
type Error struct {
	Name           string
	Call           string // acquire, settle, charge or refund
	Policy, Key    string
	Cost           *int64
	IdempotencyKey *string `json:"idempotency_key"`
	Error          string  // its kind, by the name of Go's error without Err
	SQLState       string  // empty if the client itself finds it
}

//go:embed buckets.json
var buckets []byte

//go:embed errors.json
var errors []byte

// Buckets and Errors are the contents of the files.
var (
	Buckets = read[Bucket](buckets)
	Errors  = read[Error](errors)
)

func read[T any](file []byte) (all []T) {
	if err := json.Unmarshal(file, &all); err != nil {
		panic(err)
	}
	return all
}

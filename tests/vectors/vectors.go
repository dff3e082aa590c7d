// Package vectors has what the clients of all languages must answer alike: the files beside it. The clients' own tests
// read addresses.json, the key of a peer and lines of X-Forwarded-For behind so many proxies.
package vectors

import (
	_ "embed"
	"encoding/json"
	"time"
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

// A Turn is where turn N of a calendar is, as PostgreSQL has it: the anchor is a local time of the zone, and At an instant.
type Turn struct {
	Zone   string
	Anchor time.Time
	Period Period
	N      int
	At     time.Time
}

// A Period is a number of months or of days.
type Period struct{ Months, Days int }

// Turns are cases of calendars.
var Turns = readTurns()

func readTurns() (all []Turn) {
	at := func(text string) time.Time {
		parsed, err := time.Parse("2006-01-02 15:04:05.999999", text)
		if err != nil {
			panic(err)
		}
		return parsed
	}
	for _, c := range []struct {
		zone, anchor string
		period       Period
		n            int
		turn         string // in UTC
	}{
		{"UTC", "2001-01-01 00:00:00", Period{Days: 1}, 0, "2001-01-01 00:00:00"},
		{"UTC", "2001-01-01 00:00:00", Period{Days: 1}, -1, "2000-12-31 00:00:00"},
		{"UTC", "2001-01-01 00:00:00", Period{Days: 7}, 1212, "2024-03-25 00:00:00"},
		{"UTC", "2001-01-01 12:34:56.789012", Period{Days: 2}, -366, "1998-12-31 12:34:56.789012"},

		// From the 31st, each month from there and not from the one before.
		{"UTC", "2024-01-31 00:00:00", Period{Months: 1}, 1, "2024-02-29 00:00:00"},
		{"UTC", "2024-01-31 00:00:00", Period{Months: 1}, 2, "2024-03-31 00:00:00"},
		{"UTC", "2024-01-31 00:00:00", Period{Months: 1}, 3, "2024-04-30 00:00:00"},
		{"UTC", "2024-01-31 00:00:00", Period{Months: 1}, 13, "2025-02-28 00:00:00"},
		{"UTC", "2024-01-31 00:00:00", Period{Months: 1}, -2, "2023-11-30 00:00:00"},
		{"UTC", "2024-01-31 00:00:00", Period{Months: 1}, -11, "2023-02-28 00:00:00"},
		{"UTC", "2024-02-29 00:00:00", Period{Months: 12}, -24, "2000-02-29 00:00:00"},
		{"UTC", "2024-02-29 00:00:00", Period{Months: 12}, 76, "2100-02-28 00:00:00"},

		{"Pacific/Auckland", "2024-01-01 00:00:00", Period{Days: 1}, 97, "2024-04-06 11:00:00"},
		{"Pacific/Auckland", "2024-01-01 00:00:00", Period{Days: 1}, 98, "2024-04-07 12:00:00"},
		{"Pacific/Auckland", "2024-01-01 00:00:00", Period{Days: 1}, 272, "2024-09-28 12:00:00"},
		{"Pacific/Auckland", "2024-01-01 00:00:00", Period{Days: 1}, 273, "2024-09-29 11:00:00"},
		{"America/Los_Angeles", "2001-01-01 00:00:00", Period{Months: 1}, 278, "2024-03-01 08:00:00"},
		{"America/Los_Angeles", "2001-01-01 00:00:00", Period{Months: 1}, 279, "2024-04-01 07:00:00"},

		{"Europe/Berlin", "2024-03-30 01:59:59.999999", Period{Days: 1}, 1, "2024-03-31 00:59:59.999999"},
		{"Europe/Berlin", "2024-03-30 02:00:00", Period{Days: 1}, 1, "2024-03-31 01:00:00"},
		{"Europe/Berlin", "2024-03-30 02:30:00", Period{Days: 1}, 1, "2024-03-31 01:30:00"}, // shown as 03:30
		{"Europe/Berlin", "2024-03-30 02:59:59.999999", Period{Days: 1}, 1, "2024-03-31 01:59:59.999999"},
		{"Europe/Berlin", "2024-03-30 03:00:00", Period{Days: 1}, 1, "2024-03-31 01:00:00"},
		{"Europe/Berlin", "2024-10-26 01:59:59.999999", Period{Days: 1}, 1, "2024-10-26 23:59:59.999999"},
		{"Europe/Berlin", "2024-10-26 02:00:00", Period{Days: 1}, 1, "2024-10-27 01:00:00"}, // comes twice
		{"Europe/Berlin", "2024-10-26 02:59:59.999999", Period{Days: 1}, 1, "2024-10-27 01:59:59.999999"},
		{"Europe/Berlin", "2024-10-26 03:00:00", Period{Days: 1}, 1, "2024-10-27 02:00:00"},
		{"America/New_York", "2024-01-10 01:59:59.999999", Period{Months: 1}, 2, "2024-03-10 06:59:59.999999"},
		{"America/New_York", "2024-01-10 02:30:00", Period{Months: 1}, 2, "2024-03-10 07:30:00"},
		{"America/New_York", "2024-01-10 03:00:00", Period{Months: 1}, 2, "2024-03-10 07:00:00"},
		{"America/New_York", "2024-01-03 00:59:59.999999", Period{Months: 1}, 10, "2024-11-03 04:59:59.999999"},
		{"America/New_York", "2024-01-03 01:30:00", Period{Months: 1}, 10, "2024-11-03 06:30:00"},
		{"America/New_York", "2024-01-03 02:00:00", Period{Months: 1}, 10, "2024-11-03 07:00:00"},

		{"America/Sao_Paulo", "2017-10-14 00:00:00", Period{Days: 1}, 1, "2017-10-15 03:00:00"}, // no such midnight
		{"America/Sao_Paulo", "2017-10-14 00:00:00", Period{Days: 1}, 2, "2017-10-16 02:00:00"},
		{"America/Havana", "2024-11-02 00:00:00", Period{Days: 1}, 0, "2024-11-02 04:00:00"},
		{"America/Havana", "2024-11-02 00:00:00", Period{Days: 1}, 1, "2024-11-03 05:00:00"}, // a midnight that comes twice
		{"Pacific/Apia", "2011-12-29 00:00:00", Period{Days: 1}, 0, "2011-12-29 10:00:00"},
		{"Pacific/Apia", "2011-12-29 00:00:00", Period{Days: 1}, 1, "2011-12-30 10:00:00"}, // no such day
		{"Pacific/Apia", "2011-12-29 00:00:00", Period{Days: 1}, 2, "2011-12-30 10:00:00"},
		{"Pacific/Apia", "2011-12-29 00:00:00", Period{Days: 1}, 3, "2011-12-31 10:00:00"},

		{"UTC", "2001-01-01 00:00:00", Period{Months: 12_000}, 1, "3001-01-01 00:00:00"},
		{"UTC", "2001-01-01 00:00:00", Period{Months: 12_000}, -1, "1001-01-01 00:00:00"},
		{"UTC", "2001-01-01 00:00:00", Period{Days: 365_250}, 1, "3001-01-09 00:00:00"},
		{"Europe/Berlin", "1900-01-01 00:00:00", Period{Months: 1}, 0, "1899-12-31 23:00:00"},
		{"Europe/Berlin", "1900-01-01 00:00:00", Period{Months: 1}, 1491, "2024-03-31 22:00:00"},
		{"Europe/Berlin", "1900-01-01 00:00:00", Period{Months: 240}, -1, "1879-12-31 23:06:32"}, // by the sun
		{"America/New_York", "2999-07-15 12:00:00", Period{Months: 1}, -11_700, "2024-07-15 16:00:00"},
		{"America/New_York", "2024-07-15 12:00:00", Period{Months: 1}, 11_700, "2999-07-15 16:00:00"},
	} {
		all = append(all, Turn{c.zone, at(c.anchor), c.period, c.n, at(c.turn)})
	}
	return all
}

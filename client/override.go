package client

import (
	"context"
	"fmt"
	"time"
)

// An Override gives one bucket numbers of its own, in place of its policy's: a bigger plan, a smaller one, none
// at all. To [Limiter.Override], a zero number is the policy's as of the call, and stays the same when the
// policy changes.
type Override struct {
	// Policy and Key name the bucket.
	Policy, Key string

	// Capacity is the number of tokens in a full bucket: up to 9,000,000,000,000. [Zero] blocks: every cost
	// above 0 is denied until ExpiresAt; without that it is [Decision.Never].
	Capacity int64

	// Refill is how many tokens the bucket gains in the time Every, as in a [Policy]. [Zero] refills nothing. For a key of
	// a quota both are zero.
	Refill int64
	Every  time.Duration

	// ExpiresAt ends the override: from then on it is as good as absent. It is cut to the microsecond. The
	// zero time is never.
	ExpiresAt time.Time

	// TimeZone and Anchor are those of a [Policy], and for a key of a quota only: the zone of the customer, the day on which
	// the subscription began. If zero they stay those of the key's live override, or else are the policy's as of the call.
	TimeZone string
	Anchor   time.Time

	// Lease is that of a [Policy] with slots, and for a key of such a policy only: Capacity is then up to 10,000, and the other
	// numbers are zero. It applies to leases that are granted or renewed from now on.
	Lease time.Duration
}

// Override gives a bucket numbers of its own, in place of the numbers of an earlier Override. It applies to
// calls that begin after it has been committed. The bucket keeps its level, cut to the new capacity; in a quota,
// what was used stays used. An unused bucket is full at the new size. [Limiter.Reset] in the same transaction begins a plan
// with a full bucket.
//
// It writes the override. The policy's first override writes the policy, too, and locks it until the transaction ends.
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument], [ErrLocked].
func (l *limiter) Override(ctx context.Context, o Override) error {
	if o.Every%time.Microsecond != 0 || o.Lease%time.Microsecond != 0 {
		return failed(verbOverride, fmt.Errorf("%w: every %v and lease %v must be whole microseconds", ErrInvalidArgument, o.Every, o.Lease))
	}
	if err := checkAnchor(o.Anchor); err != nil {
		return failed(verbOverride, err)
	}
	defer l.denialCache.forget(o.Policy, o.Key)
	return l.run(ctx, call{
		verb: verbOverride,
		function: "ratelimit_override($1::text, $2::text, $3::bigint, $4::bigint, $5::text::interval, $6::text::timestamptz, " +
			"$7::text, $8::text::timestamp, $9::text::interval)",
		args: []any{
			o.Policy, o.Key, number(o.Capacity), number(o.Refill), orNull(o.Every, interval(o.Every)),
			orNull(o.ExpiresAt, o.ExpiresAt.UTC().Truncate(time.Microsecond).Format(time.RFC3339Nano)),
			orNull(o.TimeZone, o.TimeZone), localTime(o.Anchor), orNull(o.Lease, interval(o.Lease)),
		},
	})
}

// RemoveOverride gives a bucket its policy's numbers again, and reports whether it had numbers of its own.
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument], [ErrLocked].
func (l *limiter) RemoveOverride(ctx context.Context, policy, key string) (removed bool, err error) {
	defer l.denialCache.forget(policy, key)
	c := newCall("remove override", "ratelimit_remove_override($1::text, $2::text)", policy, key)
	c.columns = "ratelimit_remove_override"
	err = l.query(ctx, c, &removed)
	return removed, err
}

var overrideColumns = `coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
		'policy', policy, 'key', key, 'capacity', capacity, 'refill', refill,
		'every', ` + microseconds("every") + `, 'expires_at', ` + microseconds("expires_at") + `,
		'time_zone', time_zone, 'anchor', ` + microseconds("anchor") + `, 'lease', ` + microseconds("lease") + `
		) order by policy collate "C", key collate "C"), '[]')::text`

// An overrideRow is an override as overrideColumns has it.
type overrideRow struct {
	Policy, Key   string
	Capacity      int64
	Refill, Every *int64 // null for a quota and for slots
	ExpiresAt     *int64 `json:"expires_at"`
	TimeZone      string `json:"time_zone"`
	Anchor        *int64
	Lease         int64 // null, and so 0, unless it is of slots
}

// newList reads the options of a list.
func newList(method string, opts []CallOption) settings {
	s := settings{maxRows: 1000}
	s.read(method, opts, "OfPolicy", "OfKey", "MaxRows")
	return s
}

// listKeyed lists rows about keys by a function that takes the options of newList.
func listKeyed[Row any](ctx context.Context, l *limiter, verb, columns, function string, s settings) ([]Row, error) {
	c := newCall(verb, function+"($1::text, $2::text, $3::bigint::integer)", s.policy, s.key, int64(s.maxRows))
	c.columns, c.err = columns, s.err
	return list[Row](ctx, l, c)
}

// Overrides lists overrides that have not expired, ordered by policy and key, as they can be passed to
// Override. Options are [OfPolicy], [OfKey] and [MaxRows], which defaults to 1,000. It writes and locks nothing.
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument].
func (l *limiter) Overrides(ctx context.Context, opts ...CallOption) ([]Override, error) {
	rows, err := listKeyed[overrideRow](ctx, l, "list overrides", overrideColumns, "ratelimit_overrides", newList("Overrides", opts))
	if err != nil {
		return nil, err
	}
	overrides := make([]Override, len(rows))
	for i, r := range rows {
		overrides[i] = Override{
			Policy:    r.Policy,
			Key:       r.Key,
			Capacity:  orZero(r.Capacity),
			ExpiresAt: instant(r.ExpiresAt),
			TimeZone:  r.TimeZone,
			Anchor:    instant(r.Anchor),
			Lease:     duration(r.Lease),
		}
		if r.Refill != nil {
			overrides[i].Refill, overrides[i].Every = orZero(*r.Refill), duration(*r.Every)
		}
	}
	return overrides, nil
}

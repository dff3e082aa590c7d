package policyfile_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgratelimit/pgratelimit/server/policyfile"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func parse(t require.TestingT, text string) *policyfile.File {
	file, err := policyfile.Parse("limits.yaml", []byte(text))
	require.NoError(t, err, text)
	return file
}

func apply(t require.TestingT, db policyfile.Database, text string, options ...policyfile.Options) *policyfile.Difference {
	return kit.NoError(policyfile.Apply(context.Background(), db, parse(t, text), append(options, policyfile.Options{})[0]))(t)
}

// policiesIn and overridesIn list what a database has, a line each, with times in microseconds.
func policiesIn(t require.TestingT, db *pgtest.DB) []string {
	return lines(t, db, `
		select concat_ws(' ', policy, capacity, refill, (extract(epoch from every) * 1000000)::bigint, stepped, durable,
		                 (extract(epoch from remember) * 1000000)::bigint, shadow, period, time_zone, anchor,
		                 (extract(epoch from lease) * 1000000)::bigint)
		  from ratelimit_policies()`)
}

func overridesIn(t require.TestingT, db *pgtest.DB) []string {
	return lines(t, db, `
		select concat_ws(' ', policy, key, capacity, refill, (extract(epoch from every) * 1000000)::bigint,
		                 coalesce((extract(epoch from expires_at) * 1000000)::bigint, 0), time_zone, anchor,
		                 (extract(epoch from lease) * 1000000)::bigint)
		  from ratelimit_overrides(max_rows => 1000000)`)
}

func lines(t require.TestingT, db *pgtest.DB, query string) []string {
	return slices.Sorted(slices.Values(kit.ColumnOf(t, db.Pool, query)))
}

// anyName is any text that the database stores.
var anyName = rapid.Custom(func(t *rapid.T) string {
	return rapid.OneOf(
		rapid.SampledFrom([]string{"api", "web", "42", "null", "~", "yes", "<<", "*a", "a: b", " a", "\"", "'", "é", "\u2028", "😀", "\n", "a\tb"}),
		rapid.StringN(1, 20, 100),
	).Filter(func(s string) bool { return s != "" && !strings.ContainsRune(s, 0) }).Draw(t, "name")
})

// someFile has policies of each kind with any of their fields, and overrides. What cannot change, the kind and durable, follows
// from the name. Buckets of these numbers fill within 10,000 years.
func someFile(t *rapid.T) string {
	maybe := func(fields ...string) (some string) {
		for _, field := range fields {
			if rapid.Bool().Draw(t, field) {
				some += ", " + field
			}
		}
		return some
	}
	span := func() string {
		return fmt.Sprint(rapid.IntRange(1, 50).Draw(t, "n"), rapid.SampledFrom([]string{"us", "ms", "s", "m", "h", "d", "w"}).Draw(t, "unit"))
	}
	policies, overrides := "policies:\n", "overrides:\n"
	for _, name := range rapid.SliceOfNDistinct(anyName, 1, 5, rapid.ID[string]).Draw(t, "policies") {
		capacity := fmt.Sprint("capacity: ", rapid.IntRange(1, 2000).Draw(t, "capacity"))
		durable := fmt.Sprint(", durable: ", len(name)%2 == 0)
		switch len(name) % 3 {
		case 0:
			policies += fmt.Sprintf("  %q: {%s, refill: %d, every: 1h%s%s%s}\n", name, capacity, rapid.Int64Range(0, 9e12).Draw(t, "refill"),
				span(), durable, maybe("stepped: true", "shadow: true", "remember: "+span()))
			capacity += maybe("refill: 7", "every: "+span())
		case 1:
			period := rapid.SampledFrom([]string{"1 day", "2 weeks", "18 months", "1000 years"}).Draw(t, "period")
			policies += fmt.Sprintf("  %q: {%s, period: %s%s%s}\n", name, capacity, period, durable,
				maybe("time_zone: Etc/GMT+5", "anchor: 2024-03-31T02:30:00", "shadow: true", "remember: "+span()))
			capacity += maybe("time_zone: Europe/Berlin", "anchor: 9999-12-31T23:59:59.999999")
		case 2:
			policies += fmt.Sprintf("  %q: {%s, lease: 1ms%s%s%s}\n", name, capacity, span(), durable, maybe("shadow: true"))
			capacity += maybe("lease: 1h" + span())
		}
		overrides += fmt.Sprintf("  %q: {}\n", name)
		if keys := rapid.SliceOfNDistinct(anyName, 0, 3, rapid.ID[string]).Draw(t, "keys"); len(keys) > 0 {
			overrides = strings.TrimSuffix(overrides, " {}\n") + "\n"
			for _, key := range keys {
				overrides += fmt.Sprintf("    %q: {%s%s}\n", key, capacity, maybe("expires_at: 9999-12-31T23:59:59.999999-14:00"))
			}
		}
	}
	return policies + overrides
}

// everything has the rules of a file, without places.
func everything(t require.TestingT, text string) string {
	return textOf(kit.NoError(parse(t, text).Rules(""))(t))
}

func textOf(rules *policyfile.Rules) string {
	var all []string
	for _, p := range rules.Policies {
		all = append(all, fmt.Sprintf("%s %v %t %t %v %t %s", p.Name, p.Numbers, p.Stepped, p.Durable, p.Remember, p.Shadow, p.Period))
	}
	for _, o := range rules.Overrides {
		expires := "never"
		if !o.ExpiresAt.IsZero() {
			expires = o.ExpiresAt.Format("2006-01-02 15:04:05.999999")
		}
		all = append(all, fmt.Sprintf("%s %s %v %s", o.Policy, o.Key, o.Numbers, expires))
	}
	return strings.Join(slices.Sorted(slices.Values(all)), "\n")
}

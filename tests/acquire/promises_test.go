package acquire

import (
	"context"
	"encoding/json"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// A promise is an acquire of Cost at t0 from a bucket that held Level microtokens Age microseconds
// earlier, or is said to hold them later when Age is below zero. A quota has a Period in place of Refill and Every, and the Level
// of its row.
type promise struct {
	Capacity int64 `json:"capacity"`
	Refill   int64 `json:"refill"`
	Every    int64 `json:"every"`
	Stepped  bool  `json:"stepped"`
	Level    int64 `json:"level"`
	Age      int64 `json:"age"`
	Cost     int64 `json:"cost"`

	Period *string `json:"period"`
	Zone   *string `json:"zone"`
	Anchor *int64  `json:"anchor"` // microseconds after noon of 30 March 2024, the eve of a change of clocks in Europe
}

func (c promise) Valid() bool {
	return 1 <= c.Capacity && c.Capacity <= kit.MaxTokens &&
		1 <= c.Refill && c.Refill <= kit.MaxTokens &&
		1 <= c.Every && c.Every <= kit.MaxSpan &&
		float64(c.Capacity)*float64(c.Every) < float64(c.Refill)*10*kit.MaxSpan &&
		1 <= c.Cost && c.Cost <= c.Capacity &&
		-c.Capacity*1_000_000 <= c.Level && c.Level <= c.Capacity*1_000_000 &&
		-5*kit.MaxSpan <= c.Age && c.Age <= 5*kit.MaxSpan // PostgreSQL's calendar begins in 4713 BC
}

func randomPromise(random *rand.Rand, most int64) promise {
	upTo := func(limit int64) int64 { // every magnitude is as likely as any other
		limit = min(limit, most)
		return min(limit, 1+random.Int64N(1<<(1+random.IntN(bits.Len64(uint64(limit))))))
	}
	var c promise
	for !c.Valid() {
		c = promise{Capacity: upTo(kit.MaxTokens), Refill: upTo(kit.MaxTokens), Every: upTo(kit.MaxSpan), Stepped: random.IntN(2) == 0}
		switch random.IntN(2) {
		case 0:
			c.Cost = upTo(c.Capacity)
		case 1:
			c.Cost = 1 + random.Int64N(c.Capacity)
		}
		switch wanted := c.Cost * 1_000_000; random.IntN(8) {
		case 0, 1:
			c.Level = random.Int64N(wanted)
		case 2, 3:
			c.Level = wanted - upTo(wanted)
		case 4, 5:
			c.Level = -upTo(c.Capacity * 1_000_000)
		case 6:
			c.Level = c.Capacity * 1_000_000
		}
		switch random.IntN(8) {
		case 0, 1, 2: // within the time it takes
			wait := float64(c.Cost*1_000_000-c.Level) / 1e6 / float64(c.Refill) * float64(c.Every)
			c.Age = int64(random.Float64() * wait)
		case 3, 4: // around whole intervals
			c.Age = c.Every*random.Int64N(4) + random.Int64N(3) - 1
		case 5:
			c.Age = upTo(kit.MaxSpan)
		case 6:
			c.Age = -upTo(kit.MaxSpan)
		}
	}
	return c
}

// AsQuota is the promise of a quota with the same numbers, in whole tokens.
func (c promise) AsQuota(random *rand.Rand, period string) promise {
	zones := []string{"UTC", "Europe/Berlin", "America/New_York", "America/Sao_Paulo", "Pacific/Auckland", "Asia/Kathmandu"}
	anchor := random.Int64N(1<<(1+random.IntN(54))) - random.Int64N(1<<(1+random.IntN(54)))
	c.Refill, c.Every, c.Stepped = 0, 0, false
	c.Level = min(0, max(-9_000_000_000_000, c.Level/1_000_000-c.Capacity)) * 1_000_000 // what is used
	c.Period, c.Zone, c.Anchor = &period, &zones[random.IntN(len(zones))], &anchor
	return c
}

// randomPeriod is that of a quota.
func randomPeriod(random *rand.Rand) string {
	periods := []string{"1 day", "1 day", "7 days", "30 days", "1 month", "1 month", "3 months", "1 year", "1000 years", "365250 days"}
	return periods[random.IntN(len(periods))]
}

// clockInASetting is ClockPerSession for SQL that moves the clock.
func clockInASetting(db *kit.TestDB) {
	db.ClockPerSession()
	db.Execute(`
		create function set_clock(now timestamptz) returns void language plpgsql as $$ begin perform set_config('test.now', now::text, true); end $$`)
}

// verdicts tries cases with the function of that name.
func verdicts[T any](db *kit.TestDB, cases []T) []string {
	ctx := context.Background()
	input := kit.NoError(json.Marshal(cases))(db.T)
	tx := kit.NoError(db.Pool.Begin(ctx))(db.T)
	defer tx.Rollback(ctx)
	// Were an acquire told to wait for nothing and yet find too little, it would try for ever.
	require.NoError(db.T, kit.ErrorOf(tx.Exec(ctx, "set local statement_timeout = '2min'")))
	verdicts := kit.ColumnOf(db.T, tx, "select * from verdicts($1)", input)
	require.Len(db.T, verdicts, len(cases))
	return verdicts
}

// simplestBroken looks for a verdict that is not good among cases of ever larger numbers.
func simplestBroken[T any](db *kit.TestDB, random *rand.Rand, randomCases func(random *rand.Rand, most int64) []T, good []string) string {
	for most := int64(10); most < kit.MaxSpan; most *= 10 {
		cases := randomCases(random, most)
		for i, verdict := range verdicts(db, cases) {
			if !slices.Contains(good, verdict) {
				return fmt.Sprintf("%+v: %s", cases[i], verdict)
			}
		}
	}
	return "none simpler was found"
}

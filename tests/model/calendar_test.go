package model_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

var (
	daily   = model.Period{Days: 1}
	monthly = model.Period{Months: 1}
)

// at is a time of day on a date, of no zone or in UTC.
func at(t require.TestingT, text string) time.Time {
	parsed, err := time.Parse("2006-01-02 15:04:05.999999", text)
	require.NoError(t, err)
	return parsed
}

// Each turn is where PostgreSQL has it, to the microsecond, and is the next one until then.
func TestCalendar(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		zone, anchor string
		period       model.Period
		n            int
		turn         string // in UTC
	}{
		{"UTC", "2001-01-01 00:00:00", daily, 0, "2001-01-01 00:00:00"},
		{"UTC", "2001-01-01 00:00:00", daily, -1, "2000-12-31 00:00:00"},
		{"UTC", "2001-01-01 00:00:00", model.Period{Days: 7}, 1212, "2024-03-25 00:00:00"},
		{"UTC", "2001-01-01 12:34:56.789012", model.Period{Days: 2}, -366, "1998-12-31 12:34:56.789012"},

		// From the 31st, each month from there and not from the one before.
		{"UTC", "2024-01-31 00:00:00", monthly, 1, "2024-02-29 00:00:00"},
		{"UTC", "2024-01-31 00:00:00", monthly, 2, "2024-03-31 00:00:00"},
		{"UTC", "2024-01-31 00:00:00", monthly, 3, "2024-04-30 00:00:00"},
		{"UTC", "2024-01-31 00:00:00", monthly, 13, "2025-02-28 00:00:00"},
		{"UTC", "2024-01-31 00:00:00", monthly, -2, "2023-11-30 00:00:00"},
		{"UTC", "2024-01-31 00:00:00", monthly, -11, "2023-02-28 00:00:00"},
		{"UTC", "2024-02-29 00:00:00", model.Period{Months: 12}, -24, "2000-02-29 00:00:00"},
		{"UTC", "2024-02-29 00:00:00", model.Period{Months: 12}, 76, "2100-02-28 00:00:00"},

		{"Pacific/Auckland", "2024-01-01 00:00:00", daily, 97, "2024-04-06 11:00:00"},
		{"Pacific/Auckland", "2024-01-01 00:00:00", daily, 98, "2024-04-07 12:00:00"},
		{"Pacific/Auckland", "2024-01-01 00:00:00", daily, 272, "2024-09-28 12:00:00"},
		{"Pacific/Auckland", "2024-01-01 00:00:00", daily, 273, "2024-09-29 11:00:00"},
		{"America/Los_Angeles", "2001-01-01 00:00:00", monthly, 278, "2024-03-01 08:00:00"},
		{"America/Los_Angeles", "2001-01-01 00:00:00", monthly, 279, "2024-04-01 07:00:00"},

		{"Europe/Berlin", "2024-03-30 01:59:59.999999", daily, 1, "2024-03-31 00:59:59.999999"},
		{"Europe/Berlin", "2024-03-30 02:00:00", daily, 1, "2024-03-31 01:00:00"},
		{"Europe/Berlin", "2024-03-30 02:30:00", daily, 1, "2024-03-31 01:30:00"}, // shown as 03:30
		{"Europe/Berlin", "2024-03-30 02:59:59.999999", daily, 1, "2024-03-31 01:59:59.999999"},
		{"Europe/Berlin", "2024-03-30 03:00:00", daily, 1, "2024-03-31 01:00:00"},
		{"Europe/Berlin", "2024-10-26 01:59:59.999999", daily, 1, "2024-10-26 23:59:59.999999"},
		{"Europe/Berlin", "2024-10-26 02:00:00", daily, 1, "2024-10-27 01:00:00"}, // comes twice
		{"Europe/Berlin", "2024-10-26 02:59:59.999999", daily, 1, "2024-10-27 01:59:59.999999"},
		{"Europe/Berlin", "2024-10-26 03:00:00", daily, 1, "2024-10-27 02:00:00"},
		{"America/New_York", "2024-01-10 01:59:59.999999", monthly, 2, "2024-03-10 06:59:59.999999"},
		{"America/New_York", "2024-01-10 02:30:00", monthly, 2, "2024-03-10 07:30:00"},
		{"America/New_York", "2024-01-10 03:00:00", monthly, 2, "2024-03-10 07:00:00"},
		{"America/New_York", "2024-01-03 00:59:59.999999", monthly, 10, "2024-11-03 04:59:59.999999"},
		{"America/New_York", "2024-01-03 01:30:00", monthly, 10, "2024-11-03 06:30:00"},
		{"America/New_York", "2024-01-03 02:00:00", monthly, 10, "2024-11-03 07:00:00"},

		{"America/Sao_Paulo", "2017-10-14 00:00:00", daily, 1, "2017-10-15 03:00:00"}, // no such midnight
		{"America/Sao_Paulo", "2017-10-14 00:00:00", daily, 2, "2017-10-16 02:00:00"},
		{"America/Havana", "2024-11-02 00:00:00", daily, 0, "2024-11-02 04:00:00"},
		{"America/Havana", "2024-11-02 00:00:00", daily, 1, "2024-11-03 05:00:00"}, // a midnight that comes twice
		{"Pacific/Apia", "2011-12-29 00:00:00", daily, 0, "2011-12-29 10:00:00"},
		{"Pacific/Apia", "2011-12-29 00:00:00", daily, 1, "2011-12-30 10:00:00"}, // no such day
		{"Pacific/Apia", "2011-12-29 00:00:00", daily, 2, "2011-12-30 10:00:00"},
		{"Pacific/Apia", "2011-12-29 00:00:00", daily, 3, "2011-12-31 10:00:00"},

		{"UTC", "2001-01-01 00:00:00", model.Period{Months: 12_000}, 1, "3001-01-01 00:00:00"},
		{"UTC", "2001-01-01 00:00:00", model.Period{Months: 12_000}, -1, "1001-01-01 00:00:00"},
		{"UTC", "2001-01-01 00:00:00", model.Period{Days: 365_250}, 1, "3001-01-09 00:00:00"},
		{"Europe/Berlin", "1900-01-01 00:00:00", monthly, 0, "1899-12-31 23:00:00"},
		{"Europe/Berlin", "1900-01-01 00:00:00", monthly, 1491, "2024-03-31 22:00:00"},
		{"Europe/Berlin", "1900-01-01 00:00:00", model.Period{Months: 240}, -1, "1879-12-31 23:06:32"}, // by the sun
		{"America/New_York", "2999-07-15 12:00:00", monthly, -11_700, "2024-07-15 16:00:00"},
		{"America/New_York", "2024-07-15 12:00:00", monthly, 11_700, "2999-07-15 16:00:00"},
	} {
		calendar := model.Calendar{Period: c.period, Zone: c.zone, Anchor: at(t, c.anchor)}
		name, turn := fmt.Sprintf("%+v", c), at(t, c.turn)
		require.Equal(t, turn, calendar.Turn(c.n).UTC(), name)
		require.Equal(t, turn, calendar.Next(turn.Add(-time.Microsecond)), name)
		require.True(t, calendar.Next(turn).After(turn), name)
		require.Contains(t, []time.Time{calendar.Turn(c.n + 1).UTC(), calendar.Turn(c.n + 2).UTC()}, calendar.Next(turn), name)
	}
}

func TestQuota_Arguments(t *testing.T) {
	t.Parallel()
	for name, def := range map[string]model.Definition{
		"no capacity":          {Period: &daily},
		"refill":               {Period: &daily, Numbers: model.Numbers{Capacity: new(int64(1)), Refill: new(int64(1))}},
		"every":                {Period: &daily, Numbers: model.Numbers{Capacity: new(int64(1)), Every: new(second)}},
		"stepped":              {Period: &daily, Numbers: model.Numbers{Capacity: new(int64(1))}, Stepped: new(false)},
		"no period":            {Period: &model.Period{}, Numbers: model.Numbers{Capacity: new(int64(1))}},
		"months and days":      {Period: &model.Period{Months: 1, Days: 1}, Numbers: model.Numbers{Capacity: new(int64(1))}},
		"backwards":            {Period: &model.Period{Days: -1}, Numbers: model.Numbers{Capacity: new(int64(1))}},
		"more than 1000 years": {Period: &model.Period{Months: 12_001}, Numbers: model.Numbers{Capacity: new(int64(1))}},
		"an abbreviation":      {Period: &daily, Numbers: model.Numbers{Capacity: new(int64(1)), Zone: new("CET")}},
		"no zone":              {Period: &daily, Numbers: model.Numbers{Capacity: new(int64(1)), Zone: new("Europe/Atlantis")}},
		"a zone by its path":   {Period: &daily, Numbers: model.Numbers{Capacity: new(int64(1)), Zone: new("Europe/./Berlin")}},
		"a zone of leap seconds": {Period: &daily, Numbers: model.Numbers{
			Capacity: new(int64(1)), Zone: new("right/Europe/Berlin"),
		}},
		"year 10000": {Period: &daily, Numbers: model.Numbers{
			Capacity: new(int64(1)), Anchor: new(time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)),
		}},
		"zone of a policy that refills":   {Numbers: model.Numbers{Capacity: new(int64(1)), Refill: new(int64(1)), Every: new(second), Zone: new("UTC")}},
		"anchor of a policy that refills": {Numbers: model.Numbers{Capacity: new(int64(1)), Refill: new(int64(1)), Every: new(second), Anchor: &t0}},
	} {
		require.ErrorIs(t, model.New().Define("p", def), model.InvalidArgument, name)
	}

	m := newModel(t)
	require.NoError(t, m.Define("quota", model.Definition{Period: &daily, Numbers: model.Numbers{Capacity: new(int64(1))}}))
	for name, def := range map[string]model.Definition{
		"user":  {Period: &daily},
		"org":   {Numbers: model.Numbers{Zone: new("UTC")}},
		"quota": {Numbers: model.Numbers{Refill: new(int64(0))}},
	} {
		require.ErrorIs(t, m.Define(name, def), model.InvalidArgument, name)
	}
	for name, n := range map[string]model.Numbers{
		"user":  {Zone: new("UTC")},
		"org":   {Anchor: &t0},
		"quota": {Every: new(second)},
	} {
		require.ErrorIs(t, m.Override(t0, model.BucketID{Policy: name, Key: "k"}, n, time.Time{}), model.InvalidArgument, name)
	}
}

var quota = model.BucketID{Policy: "quota", Key: "k"}

// aMonth has a month of 1,000 tokens, which begins at midnight in Berlin.
func aMonth(t require.TestingT) *model.Model {
	m := newModel(t)
	require.NoError(t, m.Define("quota", model.Definition{
		Period: &monthly, Numbers: model.Numbers{Capacity: new(int64(1000)), Zone: new("Europe/Berlin")}, Remember: new(7 * 24 * 3600 * second),
	}))
	return m
}

var turn = time.Date(2024, 3, 31, 22, 0, 0, 0, time.UTC)

func TestQuota(t *testing.T) {
	t.Parallel()
	m := aMonth(t)
	ask := func(now time.Time, cost int64) model.Decision {
		d, err := m.Acquire(now, quota, cost, "")
		require.NoError(t, err)
		return d
	}
	until := func(now time.Time) model.Micros { return model.Micros(turn.Sub(now).Microseconds()) }
	before := turn.Add(-time.Microsecond)
	require.Equal(t, allowed(200, until(t0), 1000), ask(t0, 800))
	require.Equal(t, denied(200, until(t0), until(t0), 1000), ask(t0, 201))
	require.Equal(t, denied(200, model.Never, until(t0), 1000), ask(t0, 1001))
	require.Equal(t, denied(200, 1, 1, 1000), ask(before, 1000))

	define := func(def model.Definition) { require.NoError(t, m.Define("quota", def)) }
	define(model.Definition{Numbers: model.Numbers{Capacity: new(int64(5000))}})
	require.Equal(t, allowed(4200, until(t0), 5000), ask(t0, 0))
	define(model.Definition{Numbers: model.Numbers{Capacity: new(int64(500))}})
	require.Equal(t, denied(-300, until(t0), until(t0), 500), ask(t0, 1))
	require.Equal(t, allowed(0, model.Micros(30*24*3600)*second, 500), ask(turn, 500))
	require.Equal(t, denied(0, model.Micros(30*24*3600)*second+until(t0), model.Micros(30*24*3600)*second+until(t0), 500), ask(t0, 1), "a clock that went back")

	define(model.Definition{Numbers: model.Numbers{Anchor: new(time.Date(2024, 4, 1, 0, 0, 0, 0, time.UTC))}})
	require.EqualValues(t, 0, ask(turn.Add(time.Hour), 0).Remaining, "the turn of the anchor was the last write")
	define(model.Definition{Numbers: model.Numbers{Anchor: new(time.Date(2024, 4, 1, 0, 30, 0, 0, time.UTC))}})
	require.EqualValues(t, 500, ask(turn.Add(time.Hour), 0).Remaining)
}

func TestQuota_Spending(t *testing.T) {
	t.Parallel()
	m := aMonth(t)
	acquire := func(cost int64, key string) {
		d, err := m.Acquire(t0, quota, cost, key)
		require.NoError(t, err)
		require.True(t, d.Allowed)
	}
	remaining := func(want int64) func(model.Decision, error) {
		return func(d model.Decision, err error) {
			require.NoError(t, err)
			require.Equal(t, want, d.Remaining)
		}
	}
	acquire(100, "gives back")
	acquire(100, "gives back later")
	acquire(100, "owes more")
	remaining(780)(m.Settle(t0, quota, "gives back", 20))
	remaining(1000)(m.Settle(turn, quota, "gives back later", 20))
	remaining(950)(m.Settle(turn, quota, "owes more", 150))
	remaining(960)(m.Refund(turn, quota, 10))
	remaining(1000)(m.Refund(turn, quota, 2000))
	remaining(-500)(m.Charge(turn, quota, 1500, ""))
	remaining(1000 - 9_000_000_000_000)(m.Charge(turn, quota, 9_000_000_000_000, ""))

	d, err := m.Reserve(turn, quota, 300*24*3600*second, 1, "")
	require.NoError(t, err)
	wait := model.Micros(30*24*3600) * second
	require.Equal(t, denied(1000-9_000_000_000_000, wait, wait, 1000), d)
	require.NoError(t, m.Reset(quota))
	d, err = m.Reserve(turn, quota, 0, 1000, "")
	require.NoError(t, err)
	require.Equal(t, allowed(0, wait, 1000), d)
	d, taken, err := m.AcquireUpTo(wait.After(turn), quota, 2000, 1, "")
	require.NoError(t, err)
	require.EqualValues(t, 1000, taken)
	require.True(t, d.Allowed)
}

// An override's zone and anchor are its own until it ends, and stay where the next override names none.
func TestQuota_Override(t *testing.T) {
	t.Parallel()
	m := aMonth(t)
	expires := t0.Add(24 * time.Hour)
	override := func(n model.Numbers) { require.NoError(t, m.Override(t0, quota, n, expires)) }
	override(model.Numbers{Capacity: new(int64(0)), Zone: new("Pacific/Auckland")})
	d, err := m.Acquire(t0, quota, 1000, "")
	require.NoError(t, err)
	require.Equal(t, denied(0, 24*3600*second, 0, 0), d, "a block says when it ends")

	override(model.Numbers{Anchor: &t0})
	o := m.Overrides()[quota]
	require.Equal(t, model.Override{Capacity: 1000, Zone: "Pacific/Auckland", Anchor: t0, Expires: expires}, o)
	_, err = m.Acquire(t0, quota, 1000, "")
	require.NoError(t, err)
	d, err = m.Peek(t0, quota, 1)
	require.NoError(t, err)
	require.Equal(t, denied(0, model.Micros(turn.Sub(t0).Microseconds()), model.Micros(turn.Sub(t0).Microseconds()), 1000), d, "its turn comes after it ends")

	require.NoError(t, m.Override(expires, quota, model.Numbers{}, time.Time{}))
	require.Equal(t, "Europe/Berlin", m.Overrides()[quota].Zone, "the earlier one had ended")
}

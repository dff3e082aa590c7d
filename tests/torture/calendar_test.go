package torture

import (
	"fmt"
	"math/big"
	"testing"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/vectors"
	"github.com/stretchr/testify/require"
)

// Each turn is where PostgreSQL has it, to the microsecond, and is the next one until then.
func TestCalendar_TurnsAreThoseOfPostgreSQL(t *testing.T) {
	t.Parallel()
	for _, c := range vectors.Turns {
		calendar := model.Calendar{Period: model.Period(c.Period), Zone: c.Zone, Anchor: c.Anchor}
		name := fmt.Sprintf("%+v", c)
		require.Equal(t, c.At, calendar.Turn(c.N).UTC(), name)
		require.Equal(t, c.At, calendar.Next(c.At.Add(-time.Microsecond)), name)
		require.True(t, calendar.Next(c.At).After(c.At), name)
		require.Contains(t, []time.Time{calendar.Turn(c.N + 1).UTC(), calendar.Turn(c.N + 2).UTC()}, calendar.Next(c.At), name)
	}
}

// Clean-up of the database may leave a row that it could remove, so a comparison does not find a model that would remove too much.
// A bucket that is full by the policy's numbers alone, or by its override's alone, must stay, and so must one that refills nothing. An
// override counts for as long as it had not expired when clean-up judges.
func TestCleanUp_LooksAtOverrides(t *testing.T) {
	t.Parallel()
	began, expires, user := kit.T0, kit.T0.Add(time.Hour), model.BucketID{Policy: "user", Key: "k"}
	for _, c := range []struct {
		level, capacity int64
		at              time.Time
		full            bool
	}{
		{10, 10, began, true},
		{10, 20, began, false},
		{5, 5, began, false},
		{20, 20, began, true},
		{10, 20, expires.Add(model.CleanUpMargin).Add(-time.Microsecond), false},
		{10, 20, expires.Add(model.CleanUpMargin), true},
		{9, 9, began.AddDate(5000, 0, 0), false},
	} {
		m := model.New()
		require.NoError(t, m.Define("user", model.Definition{Numbers: model.Numbers{Capacity: new(int64(10)), Refill: new(int64(0)), Every: new(model.Micros(1_000_000))}}))
		require.NoError(t, m.Override(began, user, model.Numbers{Capacity: &c.capacity}, expires))
		m.Put(user, model.Bucket{Level: big.NewInt(c.level * 1_000_000), RefilledAt: began})
		m.CleanUp(c.at)
		require.Equal(t, c.full, m.Remove(c.at, user), c)
	}
}

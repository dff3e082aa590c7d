package packages

// dbmate makes a file for each migration; dbmate runs each direction in a transaction.
func dbmate(s *source) (Files, error) {
	return s.export(step.name, map[string]string{".sql": "dbmate"})
}
